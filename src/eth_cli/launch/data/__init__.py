"""Where training tokens come from: a module for each kind of file, all giving one kind of entry."""
