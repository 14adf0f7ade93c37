import io
import itertools

from spark_megatron.tracking.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_time_left_follows_the_pace_so_far() -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=itertools.count(0, 6).__next__)
    progress.start("solving", 40)
    progress.advance(10)  # 6 s for 10 of 40
    progress.advance(20)
    progress.advance(10)
    assert stream.getvalue().splitlines() == [
        "solving: 10/40, left 0:00:18",
        "solving: 30/40, left 0:00:04",
        "solving: 40/40, took 0:00:18",
    ]


def test_a_log_file_gets_few_lines_and_a_terminal_one() -> None:
    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        progress = Progress(stream, clock=itertools.count().__next__)
        progress.start("solving", 20)
        for _ in range(20):
            progress.advance(1)
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == [
        "solving: 5/20", "solving: 10/20", "solving: 15/20", "solving: 20/20",
    ]  # fmt: skip
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().count("\r") == 20
