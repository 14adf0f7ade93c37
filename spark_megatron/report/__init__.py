"""The report of a run: one picture and one page, made from the files in its directory."""
