"""The first real cause, out of what servers said before they died (shortened excerpts)."""

from __future__ import annotations

import pytest

from workers.failure import first_cause

SHAPES = """\
(APIServer pid=10) INFO 11-30 21:33:31 [api_utils.py:286] non-default args: {}
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201] EngineCore failed to start.
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201]   File "/x/vllm/core.py", line 9, in run
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201] RuntimeError: The size of tensor a (512) \
must match the size of tensor b (576)
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed \
core proc(s): {}
"""
EMPTY_ASSERTION = """\
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201] Traceback (most recent call last):
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201]   File "/x/embedding.py", line 515, in load
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201]     assert loaded == expected
(EngineCore pid=11) ERROR 11-30 21:33:58 [core.py:1201] AssertionError
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.
"""
PYDANTIC = """\
(APIServer pid=10) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=10)   Value error, Invalid repository ID or local directory specified: '/no' \
[type=value_error, input_value=ArgsKwargs(), input_type=ArgsKwargs]
"""
USAGE = "api_server.py: error: argument --dtype: invalid choice: 'float12'"
PORT = "(APIServer pid=10) OSError: [Errno 98] Address already in use"
KILLED = "(APIServer pid=10) INFO 11-30 21:33:31 [launcher.py:1] Waiting for weights"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (SHAPES, "RuntimeError: The size of tensor a (512) must match the size of tensor b (576)"),
        (EMPTY_ASSERTION, "AssertionError in /x/embedding.py:515"),
        (
            PYDANTIC,
            "Value error, Invalid repository ID or local directory specified: '/no'",
        ),
        (USAGE, "argument --dtype: invalid choice: 'float12'"),
        (PORT, "OSError: [Errno 98] Address already in use"),
        (KILLED, "Waiting for weights"),
        ("", "it said nothing"),
    ],
)
def test_the_cause_is_found(said: str, cause: str) -> None:
    assert first_cause(said.splitlines()) == cause
