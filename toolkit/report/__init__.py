"""`--report out.html`: one self-contained page with pictures, for advise, simulate and plan."""
