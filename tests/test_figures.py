"""Figures as values: traces, numbers, colour scales, tick text. Nothing is drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from dexviz.errors import CaptureError
from dexviz.figures.curves import MAX_TICK_TOKENS, gain_curve, row_curve
from dexviz.figures.head_grid import color_range, head_grid
from dexviz.figures.numbers import three
from dexviz.figures.palette import ACCENTS, DIVERGING, SEQUENTIAL
from dexviz.figures.thumbnail import map_thumbnail
from dexviz.probes.gains import token_gains
from dexviz.probes.heads import head_rows, head_statistic
from dexviz.records import STATISTICS, Capture, HeadMap, ProbeResult
from tests.captures import make_capture

LAYERS, HEADS, TOKENS = 4, 3, 6
HOSTILE = "<b onmouseover=alert(1)>&"


@pytest.fixture
def pair() -> tuple[Capture, Capture]:
    """Two captures of one prompt with positive statistics and NaN here and there."""
    base, variant = (make_capture(LAYERS, HEADS, TOKENS, seed) for seed in (1, 2))
    stats = [{name: np.abs(values) for name, values in c.stats.items()} for c in (base, variant)]
    return replace(base, stats=stats[0]), replace(variant, stats=stats[1], tokens=base.tokens)


def grid_result(base: np.ndarray, variant: np.ndarray, signed: bool = False) -> ProbeResult:
    labels = {"side": ("base", "variant", "change"), "layer": ("L0", "L1"), "head": ("H0", "H1")}
    values = np.stack([base, variant, variant - base])
    return ProbeResult("Entropy", "nats", "…", ("side", "layer", "head"), labels, values, signed)


BASE, VARIANT = np.array([[1.0, 2.0], [3.0, np.nan]]), np.array([[1.5, 2.0], [2.0, 4.0]])


def trace(figure: go.Figure, name: str) -> go.Scatter:
    return next(t for t in figure.data if t.name == name)


@pytest.mark.parametrize("side", ["base", "variant", "change"])
def test_cells_are_scatter_markers_in_reading_order(side: str) -> None:
    result = grid_result(BASE, VARIANT)
    cells = head_grid(result, side).data[0]
    assert (cells.type, cells.mode, cells.marker.symbol[0]) == ("scatter", "markers", "square")
    assert list(zip(cells.y, cells.x, strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    wanted = result.values[result.labels["side"].index(side)].ravel()
    np.testing.assert_array_equal(np.array(cells.marker.color, float), wanted)


def test_a_blank_is_a_cross_without_colour() -> None:
    cells = head_grid(grid_result(BASE, VARIANT), "base").data[0]
    assert cells.marker.symbol == ("square", "square", "square", "x-thin-open")
    assert np.isnan(cells.marker.color[3])
    assert "base –" in cells.hovertext[3]
    assert "variant 4.00" in cells.hovertext[3]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_base_and_variant_share_one_sequential_scale_from_zero(theme: str) -> None:
    result = grid_result(BASE, VARIANT)
    for side in ("base", "variant"):
        marker = head_grid(result, side, theme=theme).data[0].marker
        assert (marker.cmin, marker.cmax, marker.cmid) == (0, 4, None)
        assert [stop[1] for stop in marker.colorscale] == SEQUENTIAL[theme]
        assert marker.colorbar.ticktext == ("0", "2.00", "4.00")


@pytest.mark.parametrize(("side", "signed", "limit"), [("change", False, 1.0), ("base", True, 4.0), ("change", True, 1.0)])
def test_signed_scales_are_diverging_and_centred_on_zero(side: str, signed: bool, limit: float) -> None:
    marker = head_grid(grid_result(BASE, VARIANT, signed), side).data[0].marker
    assert (marker.cmin, marker.cmid, marker.cmax) == (-limit, 0, limit)
    assert [stop[1] for stop in marker.colorscale] == DIVERGING["light"]
    assert marker.colorbar.ticktext[1] == "0"


def test_a_scale_exists_where_every_value_is_zero_or_blank() -> None:
    empty = np.full((2, 2), np.nan)
    assert color_range(grid_result(empty, empty), "change") == (-1, 1)
    assert color_range(grid_result(empty * 0, empty * 0), "base") == (0, 1)


def test_rounding_noise_is_no_scale() -> None:
    level = np.full((2, 2), 3.0)
    noisy = grid_result(level, level + np.array([[1e-8, -4e-9], [0, 2e-9]]))
    assert color_range(noisy, "change") == (-1, 1)
    change, base = (head_grid(noisy, side).layout.xaxis2 for side in ("change", "base"))
    assert (change.range, change.tickvals, change.ticktext) == ((-1, 1), (0,), ("0",))
    assert base.range[0] < 3 < base.range[1]
    assert base.ticktext == ("3.00",)
    assert head_grid(grid_result(BASE, VARIANT), "base").layout.xaxis2.exponentformat == "e"
    tokens = make_capture(1, 1, 3).tokens
    gains = token_gains(make_map(np.eye(3), gain=np.float32([1, 1 + 1e-7, 1]), residue=np.zeros(3, np.float32)), tokens)
    assert gains is not None
    assert gain_curve(gains).layout.yaxis.ticktext == ("1.00",)


def test_marks_lie_on_their_heads_and_ignore_the_pointer() -> None:
    adapted = np.array([[True, False], [False, True]])
    figure = head_grid(grid_result(BASE, VARIANT), "variant", selected=(1, 0), adapted=adapted)
    badges, ring = trace(figure, "adapted"), trace(figure, "selected")
    assert list(zip(badges.y, badges.x, strict=True)) == [(0, 0), (1, 1)]
    assert (ring.y, ring.x, ring.marker.symbol) == ((1,), (0,), "square-open")
    assert {badges.hoverinfo, ring.hoverinfo} == {"skip"}
    assert ["adapted by DEX" in text for text in figure.data[0].hovertext] == [True, False, False, True]


def test_no_badges_without_dex() -> None:
    names = [t.name for t in head_grid(grid_result(BASE, VARIANT), "base", adapted=np.zeros((2, 2), bool)).data]
    assert names == ["heads", "base mean", "variant mean"]


def test_hover_names_head_values_and_unit() -> None:
    text = head_grid(grid_result(BASE, VARIANT), "base").data[0].hovertext[2]
    assert text == "<b>L1·H0</b><br>Entropy, nats<br>base 3.00<br>variant 2.00<br>change −1.00"


def test_profile_is_each_layers_mean_over_known_heads() -> None:
    figure = head_grid(grid_result(BASE, VARIANT), "variant")
    assert trace(figure, "base mean").x == (1.5, 3.0)
    assert trace(figure, "variant mean").line.color == ACCENTS["light"]["variant"]
    assert trace(head_grid(grid_result(BASE, VARIANT), "change"), "change mean").x == (0.25, -1.0)


def test_grid_axes_are_numeric_with_head_and_layer_names() -> None:
    figure = head_grid(grid_result(BASE, VARIANT), "base")
    assert (figure.layout.xaxis.ticktext, figure.layout.xaxis.tickvals) == (("H0", "H1"), (0, 1))
    assert figure.layout.yaxis.ticktext == ("L0", "L1")
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]
    assert figure.layout.height == 600


@pytest.mark.parametrize("shape", [(1, 1), (2, 64), (80, 8), (30, 9)])
def test_markers_fit_their_cells(shape: tuple[int, int]) -> None:
    labels = {"side": ("base", "variant", "change"), "layer": tuple("L" * shape[0]), "head": tuple("H" * shape[1])}
    result = ProbeResult("Entropy", "nats", "…", ("side", "layer", "head"), labels, np.ones((3, *shape)))
    figure = head_grid(result, "base", width=340, height=600)
    size = figure.data[0].marker.size
    assert 3 <= size <= 22
    assert size < 600 / shape[0]
    assert len(figure.layout.xaxis.tickvals) <= 12


def test_head_statistic_is_the_mean_over_rows_and_its_change(pair: tuple[Capture, Capture]) -> None:
    base, variant = pair
    for name in STATISTICS:
        result = head_statistic(base, variant, name)
        np.testing.assert_allclose(result.values[0], np.nanmean(base.stats[name].astype(float), axis=-1), rtol=1e-5)
        np.testing.assert_allclose(result.values[2], result.values[1] - result.values[0])
        assert (result.unit, result.signed) == (STATISTICS[name].unit, STATISTICS[name].signed)


def test_probes_refuse_other_prompts_and_unknown_statistics(pair: tuple[Capture, Capture]) -> None:
    base, variant = pair
    other = replace(variant, tokens=replace(base.tokens, ids=base.tokens.ids + 1))
    with pytest.raises(CaptureError, match="on the same prompt"):
        head_statistic(base, other, "entropy")
    with pytest.raises(CaptureError, match="a statistic out of entropy"):
        head_rows(base, variant, "nonsense", 0, 0)
    with pytest.raises(CaptureError, match="a statistic out of"):
        head_statistic(base, variant, "span:elsewhere")


def test_row_curve_shows_every_query_of_both_views(pair: tuple[Capture, Capture]) -> None:
    base, variant = pair
    figure = row_curve(head_rows(base, variant, "entropy", 2, 1))
    for name, capture in zip(("base", "variant"), pair, strict=True):
        line = trace(figure, name)
        np.testing.assert_array_equal(np.array(line.y, float), capture.stats["entropy"][2, 1])
        assert line.line.color == ACCENTS["light"][name]
    assert {annotation.text for annotation in figure.layout.annotations} == {"base", "variant"}


def with_labels(capture: Capture, labels: tuple[str, ...]) -> Capture:
    return replace(capture, tokens=replace(capture.tokens, labels=labels))


def test_tick_text_repeats_words_at_their_own_positions_and_holds_no_html(pair: tuple[Capture, Capture]) -> None:
    labels = ("the", "cat", "the", "cat", HOSTILE, "")
    base, variant = (with_labels(capture, labels) for capture in pair)
    axis = row_curve(head_rows(base, variant, "entropy", 0, 0)).layout.xaxis
    assert axis.tickvals == (0, 1, 2, 3, 4, 5)
    assert axis.ticktext == ("the", "cat", "the", "cat", "&lt;b onmouseo…", " ")


def test_long_prompts_get_positions_as_tick_text() -> None:
    count = MAX_TICK_TOKENS + 1
    base, variant = make_capture(1, 1, count, 1), make_capture(1, 1, count, 2)
    figure = row_curve(head_rows(base, replace(variant, tokens=base.tokens), "entropy", 0, 0))
    assert figure.layout.xaxis.ticktext == tuple(str(place) for place in figure.layout.xaxis.tickvals)


def test_one_token_is_a_marker() -> None:
    base, variant = make_capture(1, 1, 1, 1), make_capture(1, 1, 1, 2)
    assert row_curve(head_rows(base, replace(variant, tokens=base.tokens), "entropy", 0, 0)).data[0].mode == "lines+markers"


def make_map(scores: np.ndarray, **extra: np.ndarray) -> HeadMap:
    edges = np.arange(len(scores) + 1)
    return HeadMap(1, 2, "signed", scores.astype(np.float32), scores.astype(np.float32), edges, edges, **extra)


def test_gain_curve_has_a_line_at_one_and_epsilon_in_its_hover() -> None:
    tokens = make_capture(1, 1, 3).tokens
    result = token_gains(make_map(np.eye(3), gain=np.float32([0.9, 1.1, -0.2]), residue=np.float32([0.1, 0.2, 0.3])), tokens)
    assert result is not None
    figure = gain_curve(result)
    np.testing.assert_allclose(figure.data[0].y, [0.9, 1.1, -0.2], rtol=1e-6)
    assert [row[2] for row in figure.data[0].customdata] == ["0.100", "0.200", "0.300"]
    assert figure.layout.shapes[0].y0 == 1


def test_heads_that_dex_leaves_alone_have_no_gains() -> None:
    assert token_gains(make_map(np.eye(3)), make_capture(1, 1, 3).tokens) is None


@pytest.mark.parametrize(("low", "scale", "middle"), [(0.1, SEQUENTIAL, None), (-0.5, DIVERGING, 0)])
def test_thumbnail_shows_both_maps_on_one_scale_without_the_upper_triangle(low: float, scale: dict, middle: int | None) -> None:
    base, variant = make_map(np.full((3, 3), 0.25)), make_map(np.array([[1.0, 7, 7], [low, 0.5, 7], [0.2, 0.3, 0.5]]))
    left, right = map_thumbnail(base, variant, theme="dark").data
    for heat in (left, right):
        assert (heat.type, heat.zmax, heat.zmid) == ("heatmap", 1.0, middle)
        assert heat.zmin == (0 if middle is None else -1.0)
        assert [stop[1] for stop in heat.colorscale] == scale["dark"]
        assert np.isnan(heat.z[0][1])
    assert right.z[1][0] == pytest.approx(low)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (1, "1.00"), (0.12345, "0.123"), (9.996, "10.0"), (99.96, "100"), (123456.0, "123456")),
        *((1.234e-5, "1.23e−5"), (0.00012345, "0.000123"), (2.5e7, "2.50e7")),
        *((-0.5, "−0.500"), (float("nan"), "–"), (float("inf"), "–")),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert three(value) == text


def test_signed_numbers_carry_their_sign() -> None:
    assert [three(v, signed=True) for v in (0.5, -0.5, 0)] == ["+0.500", "−0.500", "0"]
    assert [three(v, signed=True) for v in (9.6e-5, -9.6e-5)] == ["+9.60e−5", "−9.60e−5"]
