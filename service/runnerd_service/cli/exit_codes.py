"""Exit codes of the command, and the text of ``--help`` about them."""

from __future__ import annotations

OK = 0
FAILURE = 1
CONFIGURATION = 2
UNAVAILABLE = 3
REFUSED = 4
INTERRUPTED = 130

HELP = """\
exit codes:
  0    done; `serve`: stopped in order
  1    failed while it ran
  2    wrong usage or configuration, or a model that cannot be served
  3    the server cannot be reached or is not ready
  4    the server refused the request
  130  interrupted; `serve`: a second signal cut it short"""
