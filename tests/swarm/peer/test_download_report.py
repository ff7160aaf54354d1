"""What a person reads while files are downloaded."""

from thinpipe.swarm.peer.download_report import DownloadReport

MB = 1_000_000


def test_people_read_what_is_downloaded_and_how_long_still():
    now, said, calls = [100.0], [], []
    report = DownloadReport("2 files", 100 * MB, said.append, clock=lambda: now[0])
    first, second = report.file(40 * MB), report.file(60 * MB, then=lambda *stored: calls.append(stored))
    for seconds, progress, stored in ((0, first, 1), (4, first, 5), (11, first, 12), (15, first, 16), (30, second, 1)):
        now[0] = 100.0 + seconds
        progress(stored * MB, 40 * MB)
    assert said == [
        "downloading 2 files, 100 MB",
        "downloading 2 files: 12 MB of 100 MB, 88 s left",
        "downloading 2 files: 41 MB of 100 MB, 45 s left",
    ]
    now[0] = 200.0
    second(60 * MB, 60 * MB)
    assert len(said) == 3, "nothing is left"
    assert calls == [(1 * MB, 40 * MB), (60 * MB, 60 * MB)]


def test_what_was_there_before_does_not_make_the_rest_look_fast():
    now, said = [0.0], []
    report = DownloadReport("2 files", 200 * MB, said.append, clock=lambda: now[0])
    report.file(100 * MB)  # complete on disk: not called
    progress = report.file(100 * MB)
    progress(50 * MB, 100 * MB)  # the first bytes after a stop
    now[0] = 20.0
    progress(60 * MB, 100 * MB)
    assert said[1:] == ["downloading 2 files: 160 MB of 200 MB, 80 s left"]


def test_nothing_is_said_of_files_that_are_there():
    said = []
    report = DownloadReport("1 file", MB, said.append)
    report.file(MB)
    assert not said
