"""`--report`: pages that stand alone, light and dark, wide and narrow, seen by a real browser."""

import math
import random
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, Scheme, browser_page, find_browser
from null_compiler import model_file, null_spec

from nxbucket.compile.build import build
from nxbucket.compile.cache import ArtifactCache, choose_cache
from nxbucket.toolkit.choice.advise import Advice, advise, make_goal
from nxbucket.toolkit.choice.deployments import deployment_of
from nxbucket.toolkit.choice.holdout import Holdout, batches_of, hold_out, replay_of
from nxbucket.toolkit.choice.simulator import Simulation, Timeline, simulate
from nxbucket.toolkit.choice.step_times import ASSUMED
from nxbucket.toolkit.choice.trace import Trace
from nxbucket.toolkit.choice.workload import Lists, ServerLimits, StepSizes, chunk_sizes
from nxbucket.toolkit.errors import EnvironmentProblem, NxbucketError, UsageError
from nxbucket.toolkit.plan_report import PlanReport, make_plan_report
from nxbucket.toolkit.progress import PlainReporter
from nxbucket.toolkit.report import numbers
from nxbucket.toolkit.report.advise_page import advise_report
from nxbucket.toolkit.report.drawing import above, spread
from nxbucket.toolkit.report.plan_page import plan_page
from nxbucket.toolkit.report.replay_numbers import (
    cumulative,
    cumulative_of_times,
    first_steps,
    windows,
)
from nxbucket.toolkit.report.report_file import check_report, write_report
from nxbucket.toolkit.report.simulate_page import simulate_report
from nxbucket.toolkit.report.size_figures import distribution
from nxbucket.toolkit.report.svg import shortened
from nxbucket.toolkit.spec import load_spec

BAD_NAME = '<script>alert(1)</script> & "co" $x_1$ ]]> <!-- -->'
"""As a file could be called: markup, an entity, a formula, an end of something."""
MOST_BYTES = 1_500_000
LIMITS = ServerLimits(2048, 16)


def a_trace(requests: int = 400, seed: int = 1) -> Trace:
    draw = random.Random(seed)
    clock, arrivals = 0.0, array("d")
    for _ in range(requests):
        arrivals.append(clock)
        clock += draw.expovariate(5)
    prompts = array("i", (min(6000, 1 + int(draw.lognormvariate(6.3, 1))) for _ in arrivals))
    outputs = array("i", (1 + int(draw.expovariate(1 / 90)) for _ in arrivals))
    return Trace(BAD_NAME, prompts, outputs, arrivals)


@dataclass(frozen=True)
class Inputs:
    prefill: Advice
    decode: Advice
    holdouts: list[Holdout]
    simulations: list[Simulation]

    def advise_page(self) -> str:
        facts = [("Trace", BAD_NAME), ("Requests", "400")]
        return advise_report(self.prefill, self.decode, self.holdouts, facts, BAD_NAME, [BAD_NAME])

    def simulate_page(self, scenarios: int | None = None) -> str:
        return simulate_report(self.simulations[:scenarios], [("Trace", BAD_NAME)], BAD_NAME)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    trace = a_trace()
    goal = make_goal(LIMITS, ASSUMED, max_prefill_entries=6, max_decode_entries=4, grid=32)
    now: Lists = {"prefill": (512, 2048)}
    running = deployment_of(LIMITS, trace, now)
    batches = batches_of(replay_of(trace, LIMITS, ASSUMED, now))
    assert batches is not None
    prefill, decode = advise(goal, chunk_sizes(trace, LIMITS).chunks, batches, now)
    assert decode is not None
    deployments = [replace(running, name=BAD_NAME), replace(running, prefill_buckets=(2048,))]
    for seats in range(3, 17):
        buckets = tuple(sorted({1, 2, seats}))
        deployments.append(
            replace(running, name=f"{seats} seats", max_num_seqs=seats, decode_buckets=buckets)
        )
    simulations = [simulate(trace, deployment, ASSUMED) for deployment in deployments]
    return Inputs(prefill, decode, hold_out(goal, trace, now), simulations)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> PlanReport:
    """Some programs compiled, some not: recorded and estimated times."""
    folder = tmp_path_factory.mktemp("plan")
    compiler = null_spec()
    spec = load_spec(model_file(folder, (32, 128), (1, 2)))
    choice = choose_cache(spec.artifacts.cache)
    cache = ArtifactCache(choice.root)
    build(spec, cache, compiler, PlainReporter())
    spec = load_spec(model_file(folder, (32, 64, 128), (1, 2)))
    report = make_plan_report(spec, cache, choice, compiler)
    assert {row.cache for row in report.rows} == {"hit", "miss"}
    return report


@pytest.fixture(scope="module")
def pages(
    inputs: Inputs, planned: PlanReport, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    made = {
        "advise": inputs.advise_page(),
        "simulate": inputs.simulate_page(3),
        "simulate-one": inputs.simulate_page(1),
        "simulate-many": inputs.simulate_page(),
        "plan": plan_page(planned, [("Model", BAD_NAME)], notes=[BAD_NAME]),
    }
    for name, html in made.items():
        write_report(folder / f"{name}.html", html)
    return {name: folder / f"{name}.html" for name in made}


PAGES = ("advise", "simulate", "simulate-one", "simulate-many", "plan")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium on PATH")
    with browser_page(found, tmp_path_factory.mktemp("browser")) as page:
        yield page


LOOK = """(() => {
  const shown = e => e.getClientRects().length > 0;
  const box = e => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
  };
  const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const page = rgb(getComputedStyle(document.body).backgroundColor);
  const texts = [...document.querySelectorAll("h1,h2,h3,p,dt,dd,figcaption,summary,th,td")];
  const inked = texts.filter(shown).map(e => rgb(getComputedStyle(e).color));
  const svgs = [...document.querySelectorAll("figure svg")].filter(shown);
  return {
    figures: document.querySelectorAll("figure").length,
    svgs: svgs.map(svg => ({
      label: svg.getAttribute("aria-label"), role: svg.getAttribute("role"), box: box(svg),
      texts: [...svg.querySelectorAll("text")].map(t => ({
        text: t.textContent, box: box(t), ink: rgb(getComputedStyle(t).fill),
        size: parseFloat(getComputedStyle(t).fontSize) * svg.getBoundingClientRect().width
          / svg.viewBox.baseVal.width})),
      painted: svg.querySelectorAll("path, use, rect").length,
    })),
    page, inked,
    unresolved: svgs.flatMap(svg => [...svg.querySelectorAll("[href],[style]")])
      .flatMap(e => [...((e.getAttribute("href") || "") + " " + (e.getAttribute("style") || ""))
        .matchAll(/#([\\w-]+)/g)].map(m => m[1])).filter(id => !document.getElementById(id)),
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
    headings: [...document.querySelectorAll("h1,h2,h3,dd,figcaption,.note")]
      .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent),
    width: document.documentElement.clientWidth,
    scrollWidth: document.documentElement.scrollWidth,
    scripts: document.scripts.length,
    title: document.title,
  };
})()"""


def look(page: Page, file: Path, width: int, scheme: Scheme) -> dict[str, Any]:
    page.requests.clear()
    page.complaints.clear()
    page.open(file, width=width, scheme=scheme)
    seen: dict[str, Any] = page.evaluate(LOOK)
    return seen


@pytest.mark.parametrize("width", [1280, 820, 400])
@pytest.mark.parametrize("name", PAGES)
def test_every_picture_is_drawn_and_no_text_is_cut_or_lies_on_another(
    name: str, width: int, browser: Page, pages: dict[str, Path]
) -> None:
    seen = look(browser, pages[name], width, "light")
    assert len(seen["svgs"]) == seen["figures"] > 1
    for svg in seen["svgs"]:
        left, top, right, bottom = svg["box"]
        assert right - left > 300
        assert bottom - top > 50
        assert 0 <= left < right <= width
        assert svg["role"] == "img"
        assert svg["label"]
        assert svg["painted"] > 3
        assert svg["texts"]
        for text in svg["texts"]:
            x0, y0, x1, y1 = text["box"]
            assert left - 0.5 <= x0 <= x1 <= right + 0.5, (svg["label"], text)
            assert top - 0.5 <= y0 <= y1 <= bottom + 0.5, (svg["label"], text)
            assert text["size"] > 8.5, (svg["label"], text)
        assert overlaps(svg["texts"]) == [], svg["label"]
    assert seen["headings"] == []
    assert seen["scrollWidth"] <= seen["width"] == width


def overlaps(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Of the middles of the lines: a line's box has air above and below its letters."""
    boxes = []
    for text in texts:
        x0, y0, x1, y1 = text["box"]
        air = (y1 - y0) / 4
        boxes.append((x0 + 1, y0 + air, x1 - 1, y1 - air))
    return [
        (texts[i]["text"], texts[j]["text"])
        for i, a in enumerate(boxes)
        for j, b in enumerate(boxes[:i])
        if len(texts[i]["text"]) > 1 or len(texts[j]["text"]) > 1
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]


@pytest.mark.parametrize("name", PAGES)
def test_light_and_dark_differ_and_both_can_be_read(
    name: str, browser: Page, pages: dict[str, Path]
) -> None:
    light, dark = (look(browser, pages[name], 1280, s) for s in ("light", "dark"))
    assert luminance(light["page"]) > 0.9
    assert luminance(dark["page"]) < 0.02
    for seen in (light, dark):
        inks = {tuple(ink) for ink in seen["inked"]}
        inks |= {tuple(text["ink"]) for svg in seen["svgs"] for text in svg["texts"]}
        for ink in inks:
            assert contrast(ink, seen["page"]) >= 4.5, ink
    assert not {tuple(ink) for ink in light["inked"]} & {tuple(ink) for ink in dark["inked"]}


def luminance(rgb: tuple[float, ...]) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [c / 255 for c in rgb]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fills_that_lie_side_by_side_differ_in_grey(
    scheme: Scheme, browser: Page, pages: dict[str, Path]
) -> None:
    browser.open(pages["simulate-one"], width=1280, scheme=scheme)
    names = ["prefill-fill", "decode-fill", "idle", "surface"]
    fills = browser.evaluate(
        "(() => { const e = document.createElement('p'); document.body.append(e); "
        f"const found = {names}.map(n => {{ e.style.color = `var(--${{n}})`; "
        "return getComputedStyle(e).color.match(/[\\d.]+/g).map(Number); }); "
        "e.remove(); return found; })()"
    )
    prefill, decode, idle, _ = map(tuple, fills)
    assert contrast(prefill, decode) > 1.8
    assert contrast(prefill, idle) > 1.8
    assert contrast(decode, idle) > 1.5


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_nothing_and_complains_of_nothing(
    name: str, browser: Page, pages: dict[str, Path]
) -> None:
    seen = look(browser, pages[name], 1280, "light")
    assert [url for url in browser.requests if not url.startswith("data:")] == [
        pages[name].as_uri()
    ]
    assert browser.complaints == []
    assert seen["unresolved"] == []
    assert len(seen["ids"]) == len(set(seen["ids"]))
    html = pages[name].read_text()
    assert (
        re.findall(r"https?:|//[a-z]|url\((?!#)|@import|<(?:img|iframe|object|embed|base)\b", html)
        == []
    )


def test_the_policy_of_the_page_refuses_what_would_be_loaded(
    browser: Page, pages: dict[str, Path]
) -> None:
    browser.open(pages["advise"], width=1280, scheme="light")
    browser.refusals.clear()
    image = "<img src='http://127.0.0.1:9/x.png'>"
    browser.evaluate(f'document.body.insertAdjacentHTML("beforeend", "{image}")')
    browser.wait_for("Network.loadingFailed")
    assert browser.refusals == ["csp"]


@pytest.mark.parametrize("name", PAGES)
def test_names_from_files_stay_text(name: str, browser: Page, pages: dict[str, Path]) -> None:
    html = pages[name].read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    seen = look(browser, pages[name], 1280, "light")
    assert seen["scripts"] == 0
    if name != "plan":
        assert seen["title"] == BAD_NAME


def test_print_shows_the_wide_pictures_in_light(browser: Page, pages: dict[str, Path]) -> None:
    browser.open(pages["simulate"], width=640, scheme="dark", media="print")
    seen = browser.evaluate(LOOK)
    assert luminance(seen["page"]) > 0.9
    assert len(seen["svgs"]) == seen["figures"]
    assert browser.evaluate("getComputedStyle(document.querySelector('.narrow')).display") == "none"


def test_each_picture_has_its_numbers(pages: dict[str, Path]) -> None:
    for file in pages.values():
        html = file.read_text()
        figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
        assert figures
        for figure in figures:
            assert figure.count("<svg ") == 2
            assert "<details>" in figure
            assert figure.count("<tr>") > 1
            assert "<figcaption>" in figure


def test_the_same_input_gives_the_same_bytes(
    inputs: Inputs, planned: PlanReport, pages: dict[str, Path]
) -> None:
    assert inputs.advise_page() == pages["advise"].read_text()
    assert inputs.simulate_page(3) == pages["simulate"].read_text()
    again = plan_page(planned, [("Model", BAD_NAME)], notes=[BAD_NAME])
    assert again == pages["plan"].read_text()


def test_what_the_user_has_set_in_matplotlib_neither_shows_nor_goes(
    inputs: Inputs, pages: dict[str, Path]
) -> None:
    import matplotlib

    with matplotlib.rc_context(
        {"font.size": 30.0, "axes.facecolor": "red", "svg.fonttype": "path"}
    ):
        assert inputs.simulate_page(3) == pages["simulate"].read_text()
        assert matplotlib.rcParams["font.size"] == 30.0


def test_a_report_draws_without_a_window_or_global_figures(pages: dict[str, Path]) -> None:
    assert pages
    assert "matplotlib.pyplot" not in sys.modules


def test_sixteen_scenarios_fit(pages: dict[str, Path]) -> None:
    assert pages["simulate-many"].stat().st_size < MOST_BYTES


def test_millions_of_requests_and_steps_stay_small(inputs: Inputs) -> None:
    draw = random.Random(3)
    steps, requests = 100_000, 1_000_000
    timeline = Timeline()
    for i in range(steps):
        timeline.start_s.append(i * 0.01)
        timeline.end_s.append((i + 1) * 0.01)
        timeline.phase.append(1 + i % 2)
        timeline.waiting.append(draw.randrange(5000))
    times = array("d", (draw.lognormvariate(0, 2) for _ in range(1000))) * (requests // 1000)
    big = replace(
        inputs.simulations[0],
        timeline=timeline,
        ttft_s=times,
        tpot_s=times,
        latency_s=times,
        end_s=steps * 0.01,
        queue_s=dict.fromkeys(range(5000), 1.0),
    )
    assert len(simulate_report([big], [], "big")) < MOST_BYTES / 4
    sizes = Counter({n: 1 + draw.randrange(1000) for n in range(1, 2049)})
    advice = replace(inputs.prefill, sizes=StepSizes.exactly(sizes))
    assert len(advise_report(advice, None, [], [], "big")) < MOST_BYTES / 4


def test_windows_hold_all_of_the_time(inputs: Inputs) -> None:
    simulation = inputs.simulations[0]
    made = windows(simulation.timeline, 50)
    assert made is not None
    length = simulation.end_s / 50
    for phase, spent in simulation.phase_s.items():
        assert sum(made.shares[phase]) * length == pytest.approx(spent)
    assert sum(made.queue_mean) / 50 == pytest.approx(simulation.queue_mean)
    assert max(made.queue_max) == simulation.queue_max


def test_a_cumulative_curve_is_by_nearest_rank() -> None:
    found = cumulative(array("d", (5, 1, 4, 2, 3)))
    assert found is not None
    assert [found.at(share) for share in (0.01, 0.2, 0.21, 0.5, 0.95, 1.0)] == [1, 1, 2, 3, 5, 5]
    assert cumulative(array("d")) is None


def test_the_queue_keeps_its_ends_however_many_lengths_there_were() -> None:
    few = cumulative_of_times({0: 8.0, 1: 1.5, 40: 0.5})
    assert few is not None
    assert few.values == (0, 1, 40)
    assert few.shares == pytest.approx((0.8, 0.95, 1.0))
    many = cumulative_of_times({n: 1.0 / (n + 1) for n in range(10_000)}, most=100)
    assert many is not None
    assert len(many.values) <= 100
    assert (many.values[0], many.values[-1], many.shares[-1]) == (0, 9999, 1.0)
    assert cumulative_of_times({}) is None


def test_the_first_steps_begin_with_one_that_computes(inputs: Inputs) -> None:
    strip = first_steps(inputs.simulations[0].timeline, most_steps=10)
    assert strip is not None
    assert strip.steps["prefill"][0][0] == 0
    assert sum(map(len, strip.steps.values())) <= 10


def test_the_bins_hold_all_tokens(inputs: Inputs) -> None:
    for advice in (inputs.prefill, inputs.decode):
        made = distribution(advice.phase, advice.sizes.counts, advice.best.buckets)
        assert sum(b.share for b in made.bins) + made.left_out == pytest.approx(1)
        assert all(a.last + 1 == b.first for a, b in zip(made.bins, made.bins[1:], strict=False))


def test_a_server_that_served_nobody_has_a_report_too() -> None:
    trace = Trace("empty", array("i", [50_000]), array("i", [1]), array("d", [0.0]))
    deployment = deployment_of(ServerLimits(2048, 4, 4096), trace)
    simulation = simulate(trace, deployment, ASSUMED)
    assert simulation.refused == 1
    html = simulate_report([simulation], [], "nobody")
    assert "nothing was computed" in html
    one = Trace("one", array("i", [5]), array("i", [1]), array("d", [0.0]))
    assert "<svg" in simulate_report([simulate(one, deployment, ASSUMED)], [], "one")


def test_a_list_of_one_bucket_and_one_size_has_a_report_too() -> None:
    goal = make_goal(ServerLimits(1, 1), ASSUMED, grid=1, minimizes="time")
    prefill, decode = advise(goal, StepSizes.exactly({1: 3}), StepSizes.exactly({1: 2}))
    assert "<svg" in advise_report(prefill, decode, [], [], "least")


def test_without_matplotlib_a_sentence_says_what_to_install(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for attempt in (inputs.advise_page, lambda: check_report(tmp_path / "out.html")):
        with pytest.raises(EnvironmentProblem) as caught:
            attempt()
        assert caught.value.message == "a report needs matplotlib, which is not installed"
        assert caught.value.hint == "pip install 'nxbucket[report]'"


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    write_report(file, "one")
    write_report(file, "two é")
    assert file.read_bytes() == "two é".encode()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("path", ["missing/out.html", "."])
def test_a_report_needs_a_folder_and_a_name(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such folder|is a folder"):
        check_report(tmp_path / path)


def test_a_disk_that_refuses_is_a_known_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(NxbucketError, match="No space left on device"):
        write_report(tmp_path / "out.html", "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.0000042, "4.2 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (75, "75 s"),
        (600, "10 min"),
        (5 * 3600, "5 h"),
    ],
)
def test_times_are_shown_in_human_units(value: float, text: str) -> None:
    assert numbers.seconds(value) == text


def test_numbers_are_shown_short() -> None:
    assert numbers.count(1240) == "1,240"
    assert numbers.count(999_600) == "1 M"
    assert numbers.percent(0.0001) == "< 0.1 %"
    assert numbers.percent(0) == "0.0 %"
    assert numbers.data_size(1003 * 1024) == "0.979 MiB"
    assert numbers.data_size(0) == "0"
    assert numbers.power_of_two_ticks(60, 8192, 20) == [2.0**n for n in range(6, 14)]
    assert numbers.second_ticks(0, 3600, 8) == [600.0 * n for n in range(7)]


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_few_and_within(seed: int) -> None:
    draw = random.Random(seed)
    low = 10 ** draw.uniform(-6, 6)
    high, most = low * 10 ** draw.uniform(0.5, 8), draw.randrange(2, 12)
    for made in (numbers.linear_ticks, numbers.log_ticks, numbers.second_ticks):
        ticks = made(low, high, most)
        assert len(ticks) <= most
        assert all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)
        assert ticks == sorted(ticks)


def test_labels_keep_out_of_each_others_way() -> None:
    assert spread([50, 90], [20, 20], 0, 100) == [50, 90]
    assert spread([50, 54], [20, 20], 0, 100) == [42, 62]
    assert spread([0, 2, 98, 99], [20, 20, 20, 20], 0, 100) == [10, 30, 70, 90]
    assert spread([10, 20, 30, 40], [40] * 4, 0, 100) == [None, 20, None, 60]
    assert above([100, 98, 300], 17) == [100, 83, 300]


@pytest.mark.parametrize("seed", range(10))
def test_spread_labels_neither_touch_nor_leave_the_row(seed: int) -> None:
    draw = random.Random(seed)
    places = sorted(draw.uniform(-10, 510) for _ in range(draw.randrange(1, 30)))
    widths = [draw.uniform(10, 50) for _ in places]
    found = spread(places, widths, 0, 500)
    kept = [(x, w) for x, w in zip(found, widths, strict=True) if x is not None]
    assert found[-1] is not None
    ends = [0.0, *(x + w / 2 for x, w in kept)]
    starts = [*(x - w / 2 for x, w in kept), 500.0]
    assert all(end <= start + 1e-6 for end, start in zip(ends, starts, strict=True))


def test_a_shortened_path_is_the_same_line() -> None:
    path = "M 0 0 L 5 0 L 9 0 L 9 4 L 9 2 L 3 1"
    assert shortened(path) == "M 0 0 H 9 V 4 V 2 L 3 1"
    assert shortened("M 0 0 C 1 1 2 2 3 3") == "M 0 0 C 1 1 2 2 3 3"
    boxes = "M 0 0 L 0 4 L 5 4 L 5 0 z M 9 9 L 9 8 z"
    assert shortened(boxes) == "M 0 0 V 4 H 5 V 0 z M 9 9 V 8 z"


def test_contrast_is_what_wcag_says() -> None:
    assert math.isclose(contrast((0, 0, 0), (255, 255, 255)), 21)
