"""`python -m workers.states train`: makes the hidden states of a training with a vLLM server.

Speaks like `python -m speculators_core` (request on stdin, events on stderr, one JSON answer), and
is what `speclab train` asks first where hidden states come from vLLM; the training itself then
finds them in the cache. What the server says goes to stderr too, as lines that are no JSON.
"""

from __future__ import annotations

import sys

from speculators_core.__main__ import Events, Request, Result, main
from speculators_core.params import TrainParams
from speculators_core.training.extraction import make_states
from workers.states_server import starter


def _states(params: TrainParams, request: Request, events: Events) -> Result:
    return {"quarantined": make_states(params, starter(sys.stderr.buffer), events)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], {"train": _states}))
