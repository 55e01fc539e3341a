"""The report as data, as files and as a page."""

from __future__ import annotations

import errno
import json
import random
import re
import stat
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from run_events import T0, eventful, fail_at, simulate

from monarch_slurm.errors import MonarchSlurmError
from monarch_slurm.train.report import MOST_STEPS, ReportError, build_report, load_report, write_report
from monarch_slurm.train.report_html import plot_svg, render

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced and keeps what the tests ask for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.text, self.tags, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and "script" not in self.open:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def page(events, reference=None):
    text = render(build_report(events, reference))
    # A namespace is a name; anything else with a scheme would be fetched.
    assert not re.search(r"https?://", text.replace("http://10.0.0.1", ""))
    assert not re.search(r"url\(|@import|<link|<img| src=", text)
    return Page(text)


class TestData:
    def test_summary_of_an_eventful_run(self):
        report = build_report(eventful(), simulate(syncs=36))
        s = report["summary"]
        assert report["schema"] == 1
        assert report["run"] == "debug-0001"
        assert report["config"]["replicas"] == 4
        assert report["versions"]["torchft"] == "0.2.0"
        assert report["hosts"] == ["node01", "node02", "node03", "node04", "node09"]
        assert s["ok"] is True
        assert s["failures"] == 8
        assert s["failures_by_type"] == {"crash": 1, "exception": 1, "hang": 1, "host": 1, "kill": 3, "segfault": 1}
        assert s["outcomes"] == {"failed again": 1, "recovered": 7}
        assert (s["recovered"], s["replica_restarts"], s["job_restarts"], s["replicas_lost"]) == (7, 8, 0, 0)
        assert (s["states_compared"], s["states_equal"]) == (7, 7)
        assert s["stages"]["detected"] == {"count": 8, "median": pytest.approx(0.03), "worst": pytest.approx(10.0)}
        assert s["stages"]["first_commit"]["count"] == 7
        assert s["relative_difference"] == pytest.approx(
            (s["final_loss"] - s["reference_final_loss"]) / s["reference_final_loss"]
        )
        assert 0 < s["goodput"] < 1

    def test_times_of_curves_count_from_the_start(self):
        report = build_report(simulate(fail_at(2, 7.0)))
        assert report["started"] == T0
        assert report["replicas"][2]["lane"][2]["start"] == pytest.approx(7.0)
        assert report["failures"][0]["start"] == T0 + 7.0
        assert all(0 <= t <= report["summary"]["duration"] for t, _ in report["curves"]["participants"])

    def test_the_reference_may_be_events_or_a_report(self):
        reference = simulate(syncs=6)
        by_events = build_report(simulate(), reference)["reference"]
        by_report = build_report(simulate(), build_report(reference))["reference"]
        assert by_events == by_report
        assert by_events["eval"] == build_report(reference)["curves"]["eval"]

    def test_without_a_reference(self):
        report = build_report(simulate())
        assert report["reference"] is None
        assert report["summary"]["relative_difference"] is None

    def test_no_events(self):
        report = build_report([])
        assert report["summary"]["ok"] is None
        assert report["summary"]["tokens"] == 0
        assert report["failures"] == report["events"] == report["replicas"] == []

    def test_chatty_events_are_thinned(self):
        events = simulate(replicas=8, syncs=30)
        kinds = [e["kind"] for e in build_report(events)["events"]]
        assert sum(e["kind"] == "step" for e in events) > MOST_STEPS
        assert MOST_STEPS / 2 < kinds.count("step") <= MOST_STEPS
        assert "phase" not in kinds
        assert kinds.count("sync") == sum(e["kind"] == "sync" for e in events)

    @pytest.mark.parametrize(("odd", "equal"), [(None, True), (2, False)])
    def test_final_parameters_are_compared(self, odd, equal):
        events = [
            {**e, "sha256": "b" if e["replica"] == odd else "a"} if e["kind"] == "finished" else e for e in simulate()
        ]
        report = build_report(events)
        assert report["summary"]["final_states_equal"] is equal
        assert ("equal in all replicas, by sha256" in render(report)) is equal

    def test_a_second_start_of_the_job_is_counted(self):
        events = simulate()
        assert build_report([*events, {**events[0], "t": T0 + 5}])["summary"]["job_restarts"] == 1

    def test_damaged_events_never_break_a_report(self):
        rng = random.Random(7)
        odd = [None, -1, "x", [], {}, float("nan"), 10**400, True, "\udcff", b"\x00"]
        for _ in range(60):
            events = [dict(e) for e in eventful()[:: rng.randrange(1, 30)]]
            for e in rng.sample(events, len(events) // 3):
                name = rng.choice(list(e))
                if rng.random() < 0.5:
                    del e[name]
                else:
                    e[name] = rng.choice(odd)
            report = build_report([*events, None, 3, {"kind": "detected"}, {"kind": ["x"], "t": 1}])
            json.dumps(report, allow_nan=False)
            Page(render(report))
            ET.fromstring(plot_svg(report))


class TestFiles:
    def test_what_is_written_is_read_back(self, tmp_path):
        report = build_report(eventful(), simulate())
        json_path, html_path = write_report(tmp_path / "a" / "b", report)
        assert load_report(json_path) == load_report(json_path.parent) == report
        assert html_path.read_text(encoding="utf-8") == render(report)
        assert sorted(p.name for p in json_path.parent.iterdir()) == ["report.html", "report.json"]
        assert stat.S_IMODE(json_path.stat().st_mode) & 0o600 == 0o600

    def test_a_page_from_a_loaded_report_is_the_same(self, tmp_path):
        report = build_report(eventful())
        write_report(tmp_path, report)
        assert render(load_report(tmp_path)) == render(report)

    def test_a_failed_write_leaves_the_old_report(self, tmp_path, monkeypatch):
        write_report(tmp_path, build_report(simulate()))
        before = (tmp_path / "report.json").read_bytes()

        def full(fd):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(ReportError, match="No space left on device"):
            write_report(tmp_path, build_report(eventful()))
        assert (tmp_path / "report.json").read_bytes() == before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "no report at"),
            ('{"schema": 1, "summ', "is not JSON"),
            (b"\xff\xfe\x00", "is not text"),
            ("[1]", "not an object"),
            ('{"a": 1}', "not the report of a run"),
            ('{"schema": 2}', "has schema 2; this release reads 1"),
            ('{"schema": 1, "summary": {}}', "lacks curves, events, failures, replicas"),
        ],
    )
    def test_what_is_no_report_is_told(self, tmp_path, content, message):
        if content is not None:
            (tmp_path / "report.json").write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ReportError, match=message) as caught:
            load_report(tmp_path)
        assert isinstance(caught.value, MonarchSlurmError)
        assert str(tmp_path) in str(caught.value)


class TestPage:
    def test_headline_and_sections(self):
        found = page(eventful(), simulate(syncs=36))
        assert "Finished: 1.44M tokens in 99.7 s" in found.words
        assert "8 failures (1 crash, 1 exception, 1 hang, 1 host, 3 kill, 1 segfault), all survived." in found.words
        assert "Restarts of the whole job: 0." in found.words
        assert "+0.45 % against 1.6640 without failures" in found.words
        for title in ("Participants over time", "Loss", "Recoveries", "Replicas", "Failures", "Last words", "Config"):
            assert title in found.text
        assert "7 of 7" in found.text

    def test_every_failure_has_a_row_a_bar_and_its_words(self):
        found = page(eventful())
        rows = [v for k, v in found.attributes if k == "class" and v in ("rec", "rec head")]
        assert rows == ["rec head"] + ["rec"] * 8
        assert [f"f{i}" for i in range(1, 9)] == [v for k, v in found.attributes if k == "id" and re.match(r"f\d", v)]
        assert "failed again" in found.text
        assert "the last words" in found.words

    def test_a_run_without_failures(self):
        found = page(simulate())
        assert "Nothing failed." in found.words
        assert "Recoveries" not in found.text
        assert "Failures" not in found.text
        assert "There is no failure-free run to compare with." in found.words

    def test_a_run_that_ended_badly(self):
        found = page(simulate(fail_at(1, 7.0, final=True), fail_at(2, 9.0, final=True), ok=False))
        assert "Ended early after" in found.words
        assert "Reason: too few replicas for a quorum." in found.words
        assert "2 failures (2 kill), 0 survived." in found.words
        assert "Replica 1 was lost for good at 0:07: 3 failures in 60 s." in found.words
        assert ("class", "bad") in found.attributes

    def test_a_run_whose_end_is_not_known(self):
        assert "The end is not known" in page([e for e in simulate() if e["kind"] != "run_finished"]).words

    def test_no_events(self):
        found = page([])
        assert "No events: nothing is known of this run" in found.words
        assert "no loss was reported" in found.words

    def test_text_of_events_is_never_markup(self):
        evil = "</pre></script><script>alert('x')</script><img src=x onerror=alert(1)>\" onload=\"x"
        events = eventful()
        for e in events:
            for name in ("cause", "exit", "reason", "host", "traceback", "type", "run"):
                if name in e:
                    e[name] = evil
            if e["kind"] == "detected":
                e["stderr_tail"] = [evil]
            if e["kind"] == "run_started":
                e["hosts"], e["config"], e["versions"] = [evil], {evil: evil, "model": evil}, {evil: evil}
        text = render(build_report(events))
        found = Page(text)
        assert found.tags.count("script") == 2  # the series and the read-out
        assert "img" not in found.tags
        assert not [k for k, _ in found.attributes if k.startswith("on")]
        assert evil in "".join(found.text)
        picture = ET.fromstring(plot_svg(build_report(events)))
        assert not [e for e in picture.iter() if e.tag.endswith("script")]

    def test_it_reads_without_script_and_follows_the_theme(self):
        text = render(build_report(eventful()))
        assert "prefers-color-scheme: dark" in text
        assert "@media print" in text
        assert 'name="viewport"' in text
        without = re.sub(r"<script.*?</script>", "", text, flags=re.S)
        assert Page(without).words == Page(text).words

    def test_the_series_for_the_pointer_are_json(self):
        text = render(build_report(eventful()))
        series = json.loads(re.search(r'id="series">(.*?)</script>', text, re.S)[1])
        assert series["time"]["series"][0][0] == "quorum"
        assert series["tokens"]["end"] > 1e6

    def test_points_that_are_no_numbers_are_left_out(self):
        report = build_report(eventful())
        report["curves"]["eval"] += [["</script><img>", 1.0], [None, None], [1.0]]
        found = Page(render(report))
        assert "img" not in found.tags


class TestPicture:
    def test_it_is_one_svg_with_both_curves_and_a_mark_for_each_failure(self):
        picture = ET.fromstring(plot_svg(build_report(eventful(), simulate(syncs=36))))
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        drawn = [e.get("class") for e in picture.iter() if e.tag.endswith("path")]
        assert drawn.count("run") == 2
        assert drawn.count("ref") == 1
        in_charts = [e for e in picture.iter() if e.tag.endswith("title")]
        assert len(in_charts) == 2 * 8
        texts = {e.text for e in picture.iter() if e.tag.endswith("text")}
        assert {"kill", "segfault", "exception", "hang", "host", "crash", "seconds since the start"} <= texts

    def test_a_wide_run_does_not_begin_its_axis_at_zero(self):
        report = build_report(simulate(fail_at(5, 15.1, final=True), replicas=40, skew=0.0001, syncs=10))
        assert "The axis begins at 36." in Page(render(report)).words

    def test_a_dip_is_drawn_to_scale(self):
        """4, 3, 4 participants on an axis from 0 to 4: the dip is a quarter of the height of the data."""
        picture = ET.fromstring(plot_svg(build_report(simulate(fail_at(1, 15.1)))))
        path = next(e.get("d") for e in picture.iter() if e.get("class") == "run" and e.tag.endswith("path"))
        top, low, again = (float(y) for y in [re.match(r"M[\d.]+,([\d.]+)", path)[1], *re.findall(r"V([\d.]+)", path)])
        assert top == again == 24
        assert low - top == pytest.approx((150 - 24) / 4, abs=0.1)
