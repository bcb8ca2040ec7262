# Sourced by ./demo and ./check: the virtual environment that they run in, made on first use.
#
# VENV    the environment's folder (.venv). One that has what is needed is used as it is.
# PYTHON  the interpreter to make it with (the first of python3.11 ... python3 that is 3.11 or newer).

VENV=${VENV:-.venv}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: found no Python 3.11 or newer; install it, or name it with PYTHON=..." >&2
    return 1
}

# ensure_venv TARGET COMMAND: install TARGET ('.' or '.[dev]') unless COMMAND is in the environment
# and the project's requirements are those that it was installed for.
ensure_venv() {
    local target=$1 command=$2 stamp wanted
    stamp=$VENV/.installed-$command
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    if [ -x "$VENV/bin/$command" ] && { [ ! -e "$stamp" ] || [ "$(cat "$stamp")" = "$wanted" ]; }; then
        return
    fi
    echo "installing into $VENV (once; takes some minutes)" >&2
    local python
    python=$(find_python)
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable "$target"
    echo "$wanted" >"$stamp"
}
