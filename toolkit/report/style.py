"""The sheet of every report. The pictures take their colours from the same properties.

Of two fills beside each other one is darker and one hatched, so that both survive a grey printer.
"""

from nxbucket.toolkit.report.svg import NARROW, WIDE

_LIGHT = """\
  --surface: #ffffff; --panel: #f5f6f8; --ink: #1b1f24; --muted: #57606a; --rule: #dfe3e8;
  --prefill: #0b5a9c; --prefill-fill: #1f6fb2; --prefill-soft: #cfe2f3;
  --decode: #a04a00; --decode-fill: #f2a65a; --decode-soft: #fbe3cb;
  --idle: #eceff2; --limit: #b3261e;
  --s1: #1b1f24; --s2: #007a6c; --s3: #8a3a94; --s4: #a8324a; --s5: #5f6d00; --s6: #7a5230;
"""
_DARK = """\
  --surface: #14171b; --panel: #1d2126; --ink: #e9ecef; --muted: #a4adb7; --rule: #343b43;
  --prefill: #6db7f2; --prefill-fill: #3480c4; --prefill-soft: #1c3a55;
  --decode: #f6b26b; --decode-fill: #f3b069; --decode-soft: #4d351c;
  --idle: #262c33; --limit: #ff8a80;
  --s1: #e9ecef; --s2: #4fd1bd; --s3: #d79be0; --s4: #ff8fa3; --s5: #c3d04f; --s6: #d8b08c;
"""
CSS = f"""\
:root {{
{_LIGHT}}}
@media (prefers-color-scheme: dark) {{ :root {{
{_DARK}}} }}
* {{ box-sizing: border-box; }}
html {{ color-scheme: light dark; -webkit-text-size-adjust: 100%; }}
body {{
  margin: 0; background: var(--surface); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}}
main {{ max-width: {WIDE + 48}px; margin: 0 auto; padding: 2rem 24px 4rem; }}
h1, h2, h3, dd, figcaption, p {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 1.75rem; line-height: 1.2; margin: 0 0 1rem; }}
h2 {{
  font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1rem;
  border-top: 2px solid var(--rule);
}}
h3 {{ font-size: 1rem; margin: 0 0 .5rem; }}
.command {{ color: var(--muted); font-size: .85rem; margin: 0 0 .25rem; }}
dl {{
  margin: 0; display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr));
  gap: .5rem 1.5rem;
}}
dt {{ color: var(--muted); font-size: .8rem; }}
dd {{ margin: 0; }}
.note {{ border-left: 3px solid var(--muted); padding: .1rem 0 .1rem .75rem; margin: 1rem 0 0; }}
figure {{ margin: 2rem 0 0; }}
figcaption {{ color: var(--muted); font-size: .9rem; max-width: 44rem; margin-top: .5rem; }}
svg {{ display: block; width: 100%; height: auto; }}
svg * {{ stroke-linejoin: round; stroke-linecap: butt; }}
svg text {{ font-family: inherit; }}
.wide svg {{ max-width: {WIDE}px; }}
.narrow {{ display: none; }}
.narrow svg {{ max-width: {NARROW + 100}px; }}
details {{ margin-top: .5rem; font-size: .9rem; }}
summary {{ cursor: pointer; color: var(--muted); width: fit-content; }}
.scroll {{ overflow-x: auto; margin-top: .5rem; max-width: 100%; }}
details .scroll {{ max-height: 24rem; overflow-y: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; }}
th, td {{
  padding: .3rem .75rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule);
}}
th:first-child {{
  text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--surface);
}}
.words td:last-child, .words th:last-child {{
  text-align: left; white-space: normal; min-width: 12rem;
}}
tbody th {{ font-weight: normal; }}
thead th {{ font-weight: 600; vertical-align: bottom; }}
@media (max-width: 800px) {{
  main {{ padding: 1.25rem 16px 3rem; }}
  h1 {{ font-size: 1.4rem; }}
  .wide {{ display: none; }}
  .narrow {{ display: block; }}
  th, td {{ padding: .3rem .5rem; }}
}}
@media print {{
  :root {{
{_LIGHT}  }}
  main {{ max-width: none; padding: 0; }}
  .wide {{ display: block; }}
  .narrow, details {{ display: none; }}
  figure, tr {{ break-inside: avoid; }}
  h2, h3 {{ break-after: avoid; }}
  * {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
}}
"""
