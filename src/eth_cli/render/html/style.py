"""The look of the page: light and dark by what the reader's system asks for, and on paper."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #1a1f26; --soft: #5c6773; --grid: #e6e9ed;
  --edge: #dde1e6; --forward: #4f8fe8; --backward: #2a58a8; --sync: #e29a2d;
  --optimizer: #a15bc4; --bubble: #d9dee4; --other: #aab4bf; --accent: #2a6fd6;
  --good: #1d7f4e; --bad: #b4452f; --note: #fff6e0; --note-edge: #eccb7a;
  --type0: #dbe8fb; --type1: #fbe6cf; --type2: #dcf1e1; --type3: #f0e0f6;
  --type4: #f9dfe1; --type5: #e3e7ec;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --card: #1b2028; --ink: #e8ebef; --soft: #97a3b0; --grid: #2a313b;
    --edge: #2d3540; --forward: #6ea8f5; --backward: #3c6fc4; --sync: #e8aa4c;
    --optimizer: #b97fd6; --bubble: #333c47; --other: #57626f; --accent: #6ea8f5;
    --good: #5fc48e; --bad: #ee8a72; --note: #2e2815; --note-edge: #6e5c22;
    --type0: #22395c; --type1: #573d1f; --type2: #21482f; --type3: #452f50;
    --type4: #552c31; --type5: #39414b;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 15px; margin: 0 0 4px; }
p { margin: 0 0 8px; }
.soft { color: var(--soft); }
header p { color: var(--soft); margin-top: 2px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px;
  margin: 18px 0 12px; }
.tile, section { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile .name { color: var(--soft); font-size: 12px; }
.tile .value { font-size: 22px; font-weight: 600; letter-spacing: -0.01em; }
.tile .beside { color: var(--soft); font-size: 12px; }
section { padding: 16px 20px 18px; margin-top: 14px; overflow-x: auto; }
section > p { color: var(--soft); font-size: 13px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 14px; }
.pair section { min-width: 0; }
.notes { background: var(--note); border-color: var(--note-edge); }
.notes ul { margin: 0; padding-left: 18px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit; }
.label { font-size: 12px; fill: var(--ink); }
.strong { font-weight: 600; }
.tick { font-size: 11px; fill: var(--soft); }
.inside { pointer-events: none; }
.tick.inside { fill: var(--ink); opacity: 0.75; }
.grid { stroke: var(--grid); stroke-width: 1; }
.forward { fill: var(--forward); background: var(--forward); }
.backward { fill: var(--backward); background: var(--backward); }
.sync { fill: var(--sync); background: var(--sync); }
.optimizer { fill: var(--optimizer); background: var(--optimizer); }
.compute { background: var(--forward); }
.bubble { background: var(--bubble); }
.other { background: var(--other); }
.span { stroke: var(--card); stroke-width: 0.5; }
.span.predicted { opacity: 0.5; }
.span:hover, .stage:hover, .memory:hover { stroke: var(--ink); stroke-width: 1.2; }
.curve { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; }
.curve.bare { stroke-width: 1; opacity: 0.35; }
.dot { fill: var(--accent); }
.expected { stroke: var(--sync); stroke-width: 1.5; stroke-dasharray: 5 4; }
.hit { fill: transparent; }
.hit:hover { fill: var(--ink); fill-opacity: 0.12; }
.stage { stroke: var(--edge); }
.type0 { fill: var(--type0); } .type1 { fill: var(--type1); } .type2 { fill: var(--type2); }
.type3 { fill: var(--type3); } .type4 { fill: var(--type4); } .type5 { fill: var(--type5); }
.memory.capacity { fill: var(--bubble); }
.memory.predicted { fill: var(--sync); }
.memory.measured { fill: var(--accent); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 12px; color: var(--soft);
  margin: 2px 0 10px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
.legend i.capacity { background: var(--bubble); }
.legend i.predicted { background: var(--sync); }
.legend i.measured { background: var(--accent); }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12px; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.total td { font-weight: 600; }
.shares { display: flex; height: 13px; min-width: 160px; border-radius: 4px; overflow: hidden; }
td.wide { width: 40%; }
.good { color: var(--good); } .bad { color: var(--bad); }
.empty { color: var(--soft); }
footer { color: var(--soft); font-size: 12px; margin-top: 18px; }
@media print {
  :root { --page: #ffffff; }
  body { font-size: 11px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  section, .tile { break-inside: avoid; border-color: #cccccc; }
}
"""
