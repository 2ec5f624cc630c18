#!/bin/sh
# In place of an interpreter that has SGLang, beside two files that hold its answers: about.json (what is installed)
# and flags.json (its server flags). Asked for flags, it adds a line to asked.txt. Anything else it cannot do.
here=$(dirname "$0")
case "$#:$1" in
  2:-c) cat "$here/about.json" ;;
  4:-c) echo asked >> "$here/asked.txt"; echo noise; printf '%s' "$4"; cat "$here/flags.json"; echo ;;
  *) echo "this interpreter is a fake" >&2; exit 1 ;;
esac
