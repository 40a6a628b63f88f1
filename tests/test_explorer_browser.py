"""The explorer in headless Chromium: clicks and keys, and the numbers that they show.

Skipped without Playwright or Chromium, unless `GATTN_REQUIRE_BROWSER` is set: then that is a failure.
"""

import os
import shutil
import xml.etree.ElementTree as ET
from itertools import combinations, product

import pytest
import torch

import gattn
from gattn.testing import random_edge_index
from gattn.visualize import entropy, explore, rollout

pytestmark = pytest.mark.slow
HOSTILE = "<script>alert(1)</script>"
NUM_NODES, HEADS = 14, 3


def missing(reason):
    if os.environ.get("GATTN_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("needs Playwright: pip install playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        missing("needs Chromium among the programs")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page; fails if it asks for anything, has an error or opens a dialog."""
    complaints, contexts = [], []

    def show(exploration, width=1280, height=800):
        path = exploration.save(tmp_path / f"{len(contexts)}.html")
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        own = path.as_uri()
        page.on("request", lambda request: request.url == own or complaints.append(f"request of {request.url}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(own)
        page.wait_for_selector("html[data-ready=true]", state="attached")
        settled(page)
        return page

    yield show
    for context in contexts:
        context.close()
    assert not complaints


def settled(page):
    for _ in range(300):
        if page.evaluate("gattnExplorer.isSettled()"):
            break
        page.wait_for_timeout(50)
    # Two frames later, what was asked for is drawn.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture(scope="module")
def model():
    """The edges and weights of two layers, and what explores them."""
    torch.manual_seed(0)
    edge_index = random_edge_index(NUM_NODES, num_edges=60).unique(dim=1)  # each pair of nodes once
    net = gattn.models.GAT(5, 6, num_layers=2, out_channels=3, heads=HEADS).eval()
    x = 3 * torch.randn(NUM_NODES, 5)
    with gattn.record_attention(net) as records, torch.no_grad():
        net(x, edge_index)
    return records


def layer(records, number):
    record = records[f"convs.{number}"][0]
    return record.edge_index, record.weights.double()


def expected_neighbours(edge_index, alpha, node):
    """`(source, weight)` of a node's neighbours, heaviest first."""
    into = (edge_index[1] == node).nonzero().flatten()
    order = into[alpha[into].argsort(descending=True, stable=True)]
    return list(zip(edge_index[0, order].tolist(), alpha[order].tolist(), strict=True))


def listed(page, selector="#details ol button"):
    """What the list of neighbours says: names and numbers."""
    return [
        (row.locator("b").inner_text(), float(row.locator(".value").inner_text()))
        for row in page.locator(selector).all()
    ]


def check_list(page, records, number, head, node):
    edge_index, weights = layer(records, number)
    alpha = weights.mean(1) if head is None else weights[:, head]
    expected = expected_neighbours(edge_index, alpha, node)
    found = listed(page)
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1.1e-4)
    by_name = {str(source): value for source, value in expected}
    assert {name for name, _ in found} == set(by_name)
    for name, value in found:
        assert value == pytest.approx(by_name[name], abs=1.1e-4)
    selected = page.locator("#details ol button", has=page.locator("small", has_text="itself"))
    assert selected.locator("b").all_inner_texts() == [str(node)] * (str(node) in by_name)


def click_node(page, node):
    settled(page)
    x, y = page.evaluate(f"gattnExplorer.place({node})")
    page.locator("#graph").click(position={"x": x, "y": y})


def test_layers_and_heads(show, model):
    page = show(explore(model, node=3, path=None))
    check_list(page, model, 0, None, 3)
    for head in range(HEADS):
        page.locator(f"#heads label:has(input[value='{head}'])").click()
        check_list(page, model, 0, head, 3)
        values = page.evaluate("gattnExplorer.field().values")
        assert values == pytest.approx(layer(model, 0)[1][:, head].tolist(), abs=1e-5)
    page.get_by_role("button", name="Next layer").click()
    check_list(page, model, 1, 0, 3)
    page.locator("#layer").select_option("convs.0")
    page.locator("#heads label:has(input[value='-1'])").click()
    check_list(page, model, 0, None, 3)


def test_click_on_a_node(show, model):
    page = show(explore(model, node=3, path=None))
    for node in (0, 7, 12):
        click_node(page, node)
        assert page.locator("#node-name").inner_text() == str(node)
        check_list(page, model, 0, None, node)
        edge_index, weights = layer(model, 0)
        nats, uniform = entropy(weights.mean(1), edge_index)
        said = page.locator("#details h3").first.inner_text()
        assert (
            f"{nats[node]:.2f} of {uniform[node]:.2f} nats, {100 * nats[node] / uniform[node]:.0f} % of uniform" in said
        )
        degree = int((edge_index[1] == node).sum())
        assert f"1/{degree} = {1 / degree:.4f}" in page.locator(".key").inner_text()


def test_bars_mark_uniform_attention(show, model):
    page = show(explore(model, node=3, path=None))
    boxes = page.evaluate(
        "[...document.querySelectorAll('.bars .bar')].map((bar) => [bar, bar.children[0], bar.children[1]]"
        ".map((part) => part.getBoundingClientRect()).map((box) => [box.left, box.width]))"
    )
    edge_index, weights = layer(model, 0)
    expected = [weight for _, weight in expected_neighbours(edge_index, weights.mean(1), 3)]
    most = max(*expected, 1 / len(expected))
    for ((left, width), (_, bar), (mark, thick)), weight in zip(boxes, expected, strict=True):
        assert bar == pytest.approx(width * weight / most, abs=1.5)
        assert mark + thick / 2 - left == pytest.approx(width / len(expected) / most, abs=1.5)


def test_matrix_and_graph_are_linked(show, model):
    page = show(explore(model, node=3, path=None))
    edge_index, weights = layer(model, 0)
    source, target = edge_index[:, 5].tolist()
    x, y = page.evaluate(f"gattnExplorer.cell({target}, {source})")
    page.locator("#matrix").hover(position={"x": x, "y": y})
    settled(page)
    tooltip = page.locator("#tooltip").inner_text()
    assert tooltip.startswith(f"{source} → {target}")
    assert float(tooltip.splitlines()[-1]) == pytest.approx(float(weights[5].mean()), abs=1.1e-4)
    assert page.evaluate("gattnExplorer.state.hover.edge") == 5  # the graph draws the same edge
    page.locator("#matrix").click(position={"x": x, "y": y})
    assert page.locator("#node-name").inner_text() == str(target)
    page.locator("#details ol button").last.click()
    assert page.locator("#node-name").inner_text() != str(target)


def test_threshold_hides_edges(show, model):
    page = show(explore(model, node=3, path=None))
    alpha = layer(model, 0)[1].mean(1)
    assert len(page.evaluate("gattnExplorer.visible()")) == len(alpha)
    page.locator("#threshold").fill("0.6")
    least = 0.36 * float(alpha.max())
    left = (alpha >= least).nonzero().flatten().tolist()
    assert 0 < len(left) < len(alpha)
    assert page.evaluate("gattnExplorer.visible()") == left
    assert page.locator("#shown").inner_text() == f"Showing {len(left)} edges of {len(alpha)}."
    assert page.locator("#threshold-value").inner_text() == f"≥ {least:.3f}"
    assert all(value >= least - 1e-4 for _, value in listed(page))


def test_search(show, model):
    names = [f"node {chr(97 + i)}" for i in range(NUM_NODES)]
    page = show(explore(model, node=3, labels=names, path=None))
    page.locator("#search").fill("E C")
    assert page.locator("#results li").all_inner_texts() == ["node c · 2"]
    page.keyboard.press("Enter")
    assert page.locator("#node-name").inner_text() == "node c"
    page.locator("#search").fill("node")
    page.locator("#results li").nth(4).click()
    assert page.locator("#node-name").inner_text() == "node e"
    page.locator("#search").fill("nobody")
    assert "No node" in page.locator("#results").inner_text()


def test_keyboard_alone(show, model):
    page = show(explore(model, node=3, path=None))
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
    assert {"search", "help-button", "show", "layer", "next-layer", "threshold", "reach", "graph", "matrix"} <= reached
    page.keyboard.press("]")
    assert page.locator("#layer").input_value() == "1"
    page.keyboard.press("[")
    page.keyboard.press(".")
    check_list(page, model, 0, 0, 3)
    page.keyboard.press(",")
    page.locator("#graph").focus()
    edge_index, weights = layer(model, 0)
    expected = expected_neighbours(edge_index, weights.mean(1), 3)
    place = 1 if expected[1][0] != 3 else 2
    for _ in range(place + 1):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(150)
    source, weight = expected[place]
    assert page.locator("#status").inner_text() == f"{source}, {weight:.4f}, neighbour {place + 1} of {len(expected)}"
    page.keyboard.press("Enter")
    assert page.locator("#node-name").inner_text() == str(source)
    page.keyboard.press("Backspace")
    assert page.locator("#node-name").inner_text() == "3"
    page.keyboard.press("PageDown")
    assert page.locator("#node-name").inner_text() == "4"
    page.keyboard.press("/")
    page.keyboard.type("11")
    page.keyboard.press("Enter")
    assert page.locator("#node-name").inner_text() == "11"
    page.locator("#matrix").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.locator("#node-name").inner_text() == "10"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_names_are_text(show, model):
    hostile = [HOSTILE, "</script><img src=x onerror=alert(2)>", "<!--", "\u2028", "<b>bold</b>", "&amp;"]
    labels = [*hostile, *map(str, range(len(hostile), NUM_NODES))]
    edges = dict.fromkeys(product(range(NUM_NODES), repeat=2), "<img src=x onerror=alert(3)>")
    title = "</title></script><script>alert(4)</script>"
    page = show(explore(model, node=0, labels=labels, classes=labels, edge_labels=edges, title=title, path=None))
    assert page.locator("#title").inner_text() == title
    assert page.title() == title
    assert page.locator("#node-name").inner_text() == HOSTILE
    for node in range(1, 6):
        click_node(page, node)
        assert page.locator("#node-name").text_content() == labels[node]
        page.locator("#details ol button").first.hover()
    page.locator("#search").fill("img")
    assert page.locator("#results li").inner_text() == f"{labels[1]} · 1"
    assert page.locator("img, body script[src], b:not(.name b):not(dialog b)").count() == 0


def test_rollout(show, model):
    page = show(explore(model, node=3, path=None))
    page.locator("#layer").select_option("convs.1")
    page.locator("#show").select_option("rollout")
    edge_index, _ = layer(model, 0)
    weights = [layer(model, number)[1] for number in range(2)]
    for residual in (0.5, 0.2):
        page.locator("#residual").fill(str(residual))
        matrix = rollout(weights, edge_index, residual=residual).to_dense()
        assert page.evaluate("gattnExplorer.field().shares") == pytest.approx(matrix[3].tolist(), abs=1e-5)
        field = page.evaluate("gattnExplorer.field()")
        dense = torch.zeros(NUM_NODES, NUM_NODES, dtype=torch.double)
        dense[field["target"], field["source"]] = torch.tensor(field["values"], dtype=torch.double)
        torch.testing.assert_close(dense, matrix, atol=1e-5, rtol=0)
    assert [value for _, value in listed(page)] == pytest.approx(
        [value for value in matrix[3].sort(descending=True).values.tolist() if value > 0], abs=1.1e-4
    )
    page.get_by_role("button", name="Previous layer").click()  # the rollout of the first layer
    first = rollout(weights[:1], edge_index, residual=0.2).to_dense()[3]
    assert page.evaluate("gattnExplorer.field().shares") == pytest.approx(first.tolist(), abs=1e-5)


def paths(edge_index, weights, node, depth):
    """Goes through the computation tree: each edge with the product of weights from it to the root."""
    if depth < 0:
        return
    for edge in (edge_index[1] == node).nonzero().flatten().tolist():
        alpha = float(weights[depth][edge])
        yield edge, alpha
        yield from (
            (further, alpha * product)
            for further, product in paths(edge_index, weights, int(edge_index[0, edge]), depth - 1)
        )


def test_attribution_along_the_computation_tree(show, model):
    page = show(explore(model, node=3, path=None))
    page.locator("#layer").select_option("convs.1")
    page.locator("#show").select_option("gatt")
    edge_index, _ = layer(model, 0)
    weights = [layer(model, number)[1].mean(1) for number in range(2)]
    expected = torch.zeros(edge_index.size(1), dtype=torch.double)
    for edge, product_ in paths(edge_index, weights, 3, 1):
        expected[edge] += product_
    assert page.evaluate("gattnExplorer.field().values") == pytest.approx(expected.tolist(), abs=1e-5)
    values = [value for _, value in listed(page, "#details ol.pairs button")]
    assert values == pytest.approx(expected.sort(descending=True).values[: len(values)].tolist(), abs=1.1e-4)

    first, second = expected_neighbours(edge_index, weights[1], 3)[:2]
    items = page.locator("[role=tree] > li > ul > li")
    assert [items.nth(i).locator("> .row .product").inner_text() for i in (0, 1)] == [
        f"{first[1]:.4f}",
        f"{second[1]:.4f}",
    ]
    page.locator("[role=tree] > li").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):  # to the second child, open it, into it
        page.keyboard.press(key)
    below = expected_neighbours(edge_index, weights[0], second[0])[0]
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label == f"{below[0]}, weight {below[1]:.4f}, product {second[1] * below[1]:.4f}"


def test_arcs_over_tokens(show):
    model = gattn.models.TransformerLM(9, 8, 2, 2).eval()
    tokens = ["the", "cat", "sat", "on", "it"]
    with gattn.record_attention(model) as records, torch.no_grad():
        model(torch.tensor([[1, 2, 3, 4, 5]]))
    page = show(explore(records, tokens=tokens, node=4, path=None))
    assert page.locator("#graph-heading").inner_text() == "Arcs"
    weights = records["layers.0.self_attn"][0].weights[0].double()
    expected = dict(zip(tokens, weights.mean(0)[4].tolist(), strict=True))
    assert dict(listed(page)) == pytest.approx(expected, abs=1.1e-4)
    x, y = page.evaluate("gattnExplorer.place(1)")
    page.locator("#graph").hover(position={"x": x, "y": y})
    settled(page)
    assert page.locator("#tooltip").inner_text().splitlines()[0] == "cat"
    page.locator("#graph").click(position={"x": x, "y": y})
    assert dict(listed(page)) == pytest.approx(
        {"the": float(weights.mean(0)[1, 0]), "cat": float(weights.mean(0)[1, 1])}, abs=1.1e-4
    )
    page.locator("#layer").select_option("layers.1.self_attn")
    page.locator("#show").select_option("rollout")
    shares = rollout([calls[0].weights[0] for calls in records.values()])[1]
    assert page.evaluate("gattnExplorer.field().shares") == pytest.approx(shares.tolist(), abs=1e-5)


def test_two_sequences(show):
    model = gattn.models.TransformerSeq2Seq(9, 9, 8, 2, 2).eval()
    with gattn.record_attention(model) as records, torch.no_grad():
        model(torch.randint(3, 9, (1, 3)), torch.randint(3, 9, (1, 4)))
    page = show(explore(records, tokens=(list("abc"), list("wxyz")), path=None))
    options = page.locator("#layer option").all_inner_texts()
    page.locator("#layer").select_option("decoder.layers.1.multihead_attn")
    assert page.locator("#show option[value=rollout]").is_disabled()  # its inputs are two sequences
    x, y = page.evaluate("gattnExplorer.place(3 + 2)")
    page.locator("#graph").click(position={"x": x, "y": y})
    assert page.locator("#node-name").inner_text() == "y"
    weights = records["decoder.layers.1.multihead_attn"][0].weights[0].double().mean(0)[2]
    assert dict(listed(page)) == pytest.approx(dict(zip("abc", weights.tolist(), strict=True)), abs=1.1e-4)
    page.locator("#layer").select_option(options[1])
    page.locator("#show").select_option("rollout")  # the encoder's layers follow one another
    shares = rollout([records[name][0].weights[0] for name in options[:2]])
    node = page.evaluate("gattnExplorer.state.node")
    assert page.evaluate("gattnExplorer.field().shares") == pytest.approx(shares[node].tolist(), abs=1e-5)


def test_classes_differ_by_colour_and_shape(show, model):
    page = show(explore(model, node=3, classes=torch.arange(NUM_NODES) % 3, path=None))
    marks = page.evaluate(
        "[...document.querySelectorAll('#legend span:not(.scale) canvas')].map((mark) => mark.toDataURL())"
    )
    assert len(set(marks)) == 3
    assert page.locator("#legend").inner_text().split("\n")[-3:] == ["class 0", "class 1", "class 2"]
    drawn = page.locator("#graph").screenshot()
    page.locator("#colour").select_option("weight")
    settled(page)
    assert page.locator("#graph").screenshot() != drawn


def test_large_graphs(show):
    """As many nodes and edges as are drawn as a whole; nothing is drawn more often than something changes."""
    edge_index = random_edge_index(3000, num_edges=15000)
    page = show(explore(edge_index, torch.rand(15000), node=5, pos=torch.randn(3000, 2), path=None))
    assert page.locator("#reach").input_value() == "0"
    assert len(page.evaluate("gattnExplorer.visible()")) == 15000
    before = page.evaluate("gattnExplorer.draws().graph")
    page.wait_for_timeout(300)
    assert page.evaluate("gattnExplorer.draws().graph") == before
    page.evaluate(
        "for (let i = 0; i < 50; i++) { const field = document.getElementById('threshold'); field.value = i / 100;"
        "field.dispatchEvent(new Event('input')); }"
    )
    settled(page)
    assert page.evaluate("gattnExplorer.draws().graph") - before <= 2


def test_larger_graphs_are_shown_around_a_node(show):
    edge_index = random_edge_index(4000, num_edges=9000)
    page = show(explore(edge_index, torch.rand(9000), node=5, path=None))
    assert page.locator("#reach").input_value() == "2"
    assert page.locator("#reach option[value='0']").is_disabled()
    within = {5}
    for _ in range(2):
        within |= {int(a) for a, b in edge_index.t().tolist() if b in within}
    edges = [i for i, (a, b) in enumerate(edge_index.t().tolist()) if a in within and b in within]
    assert page.evaluate("gattnExplorer.visible()") == edges
    assert f"{len(within)} nodes" in page.locator("#shown").inner_text()


def test_on_a_phone(show, model):
    page = show(explore(model, node=3, classes=torch.arange(NUM_NODES) % 3, path=None), 390, 844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    click_node(page, 7)
    assert page.locator("#node-name").inner_text() == "7"


def test_tools_cover_no_picture_and_nodes_do_not_overlap(show, load):
    data = load("karate")
    net = gattn.models.GAT(data.num_features, 8, num_layers=1, heads=2)
    page = show(explore(net, data.x, data.edge_index, classes=data.y, path=None), 390, 844)
    boxes = page.evaluate(
        "[...document.querySelectorAll('.tools, .frame')].map((part) => part.getBoundingClientRect())"
        ".map((box) => [box.left, box.top, box.right, box.bottom])"
    )
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    radius = page.evaluate("gattnExplorer.radius()")
    places = torch.tensor(page.evaluate(f"[...Array({data.num_nodes}).keys()].map(gattnExplorer.place)"))
    assert torch.pdist(places).min() > 2.2 * radius


def test_the_selected_row_has_no_tint(show, model):
    page = show(explore(model, node=3, path=None))
    source, target = layer(model, 0)[0].tolist()
    pairs = set(zip(target, source, strict=True))

    cells = [next((row, node) for node in range(NUM_NODES) if (row, node) not in pairs) for row in (3, 8)]
    selected, other = page.evaluate(
        f"""() => {{
            const canvas = document.getElementById("matrix");
            const {{ data, width }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return {[list(cell) for cell in cells]}.map((cell) => gattnExplorer.cell(...cell).map(Math.round))
                .map(([x, y]) => [...data.slice(4 * (y * width + x), 4 * (y * width + x) + 4)]);
        }}"""
    )
    assert selected == other


def test_all_heads_at_a_glance(show, model):
    page = show(explore(model, node=3, path=None))
    assert f"2 layers · {HEADS} heads, then 1 · " in page.locator("#summary").inner_text()
    page.keyboard.press("o")
    pictures = page.locator("#heads-overview canvas").all()
    assert len(pictures) == HEADS + 1
    for picture, (number, head) in zip(pictures, [(0, head) for head in range(HEADS)] + [(1, 0)], strict=True):
        edge_index, weights = layer(model, number)
        drawn = picture.evaluate(
            "(canvas) => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
        )
        red, _, _, opacity = torch.tensor(drawn).view(NUM_NODES, NUM_NODES, 4).unbind(2)
        dense = torch.zeros(NUM_NODES, NUM_NODES, dtype=torch.double)
        dense[edge_index[1], edge_index[0]] = weights[:, head]
        assert opacity.equal(255 * (dense > 0.00001))
        inked = dense > 0.00001
        shares = (16 * dense[inked] / dense.max()).clamp(max=15)  # 16 colours, each with less red than the one before
        order = shares.argsort()
        assert bool((red[inked][order].diff() <= 0).all())
    page.get_by_role("button", name="convs.0, head 1", exact=True).click()
    assert not page.locator("#overview").is_visible()
    check_list(page, model, 0, 1, 3)
    page.get_by_role("button", name="All heads").click()
    page.get_by_role("button", name="convs.1, head 0", exact=True).click()
    check_list(page, model, 1, 0, 3)


@pytest.mark.parametrize("view", ["graph", "matrix"])
def test_pictures_are_saved(show, model, tmp_path, view):
    labels = [HOSTILE, *map(str, range(1, NUM_NODES))]
    page = show(explore(model, node=0, labels=labels, classes=torch.arange(NUM_NODES) % 3, title="A/B", path=None))

    def saved(kind):
        with page.expect_download() as download:
            page.locator(f"[data-view={view}][data-save={kind}]").click()
        assert download.value.suggested_filename == f"A-B-convs.0-mean-of-heads-{view}.{kind}"
        download.value.save_as(tmp_path / kind)
        return tmp_path / kind

    root = ET.parse(saved("svg")).getroot()
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    alpha = layer(model, 0)[1].mean(1).max()
    assert {f"Attention weights, convs.0, mean of heads, 0 to {alpha:.2f}", "class 0", "class 1", "class 2"} <= words
    assert any(text.startswith("<script>") for text in words)
    header = saved("png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
    size = [float(root.get(name)) for name in ("width", "height")]
    assert [width, height] == [3 * length for length in size]


def test_equal_names_have_numbers(show):
    tokens = ["the", "cat", "the", "mat"]
    page = show(explore(torch.rand(4, 4), tokens=tokens, node=0, path=None))
    assert {name for name, _ in listed(page)} == {"the · 0", "cat", "the · 2", "mat"}
    assert page.locator("#node-name").inner_text() == "the · 0"
    page.locator("#graph").hover(position=dict(zip("xy", page.evaluate("gattnExplorer.place(2)"), strict=True)))
    settled(page)
    assert page.locator("#tooltip").inner_text().splitlines()[0] == "the · 2"
    page.locator("#help-button").click()
    assert "An arc above the tokens leads forwards" in page.locator("#help").inner_text()


def test_types_of_nodes_and_edges(show):
    cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    net = gattn.nn.HGTConv(4, 4, (["paper", "author"], [cites, writes]), heads=2)
    x = {"paper": torch.randn(3, 4), "author": torch.randn(2, 4)}
    edges = {cites: torch.tensor([[0, 1], [2, 2]]), writes: torch.tensor([[1], [2]])}
    page = show(explore(net, x, edges, node=2, path=None))
    assert page.locator("#node-name").inner_text() == "paper 2"
    assert page.locator("#node-facts").inner_text() == "paper · 3 neighbours"
    rows = page.locator("#details ol button .name").all_inner_texts()
    assert sorted(" ".join(row.split()) for row in rows) == ["author 1 writes", "paper 0 cites", "paper 1 cites"]


def test_in_the_frame_of_a_notebook(browser, tmp_path, model):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html>{explore(model, node=3, path=None)._repr_html_()}", encoding="utf-8")
    page = browser.new_page()
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#layer").select_option("convs.1")
    edge_index, weights = layer(model, 1)
    expected = [weight for _, weight in expected_neighbours(edge_index, weights[:, 0], 3)]
    shown = [float(value) for value in frame.locator("#details ol .value").all_inner_texts()]
    assert shown == pytest.approx(expected, abs=1.1e-4)
    assert not complaints
    page.close()
