"""What a job prints is kept in order, without secrets, and never without its end."""

from __future__ import annotations

import io

from workers.log import RunLog, last_meaningful_line, lines_of, redactor


def _lines(path):
    return path.read_text().splitlines()


def test_lines_are_appended_across_attempts(tmp_path):
    for text in ("first", "second"):
        log = RunLog(tmp_path / "run" / "log.txt")
        log.pump([text.encode() + b"\n"])
        log.close()
    assert _lines(tmp_path / "run" / "log.txt") == ["first", "second"]


def test_of_a_redrawn_progress_bar_the_last_state_is_kept(tmp_path):
    log = RunLog(tmp_path / "log.txt")
    log.pump([b"10%\r50%\r100%\n", b"windows\r\n"])
    log.close()
    assert _lines(tmp_path / "log.txt") == ["100%", "windows"]


def test_hub_tokens_url_passwords_and_secret_variables_are_blanked():
    redact = redactor({"HF_TOKEN": "hf_" + "a" * 30, "MY_API_KEY": "opensesame", "P": "/usr"})
    assert redact("login with hf_" + "b" * 24) == "login with ***"
    assert redact("redis://lab:pa55@host:6379/0") == "redis://***@host:6379/0"
    assert redact("redis://:pa55@host") == "redis://***@host"
    assert redact("key opensesame in /usr") == "key *** in /usr"
    assert redact("Authorization: Bearer abcdef123456") == "Authorization: Bearer ***"
    assert redact("http://127.0.0.1:8000/v1 at 10:30") == "http://127.0.0.1:8000/v1 at 10:30"


def test_a_full_log_stays_bounded_and_still_ends_with_the_last_lines(tmp_path):
    log = RunLog(tmp_path / "log.txt", limit=1000)
    for i in range(2000):
        log.write(f"line {i}")
    log.close()
    lines = _lines(tmp_path / "log.txt")
    assert lines[0] == "line 0"
    assert lines[-1] == "line 1999"
    assert (tmp_path / "log.txt").stat().st_size < 1000 + 400 * 12 + 200
    assert any("left out" in line for line in lines)


def test_a_line_without_an_end_is_broken_instead_of_buffered(tmp_path):
    pieces = list(lines_of(io.BytesIO(b"x" * 100_000)))
    assert sum(map(len, pieces)) == 100_000
    assert max(map(len, pieces)) <= 16 * 2**10


def test_the_line_that_says_why_is_the_last_error_else_the_last_words():
    trace = ["Traceback (most recent call last):", "ValueError: no d2t", "----", "cleaning up"]
    assert last_meaningful_line(trace) == "ValueError: no d2t"
    assert last_meaningful_line(["step 3", "  ", "====", "[speclab 2026] ended"]) == "step 3"
    assert last_meaningful_line([]) is None
