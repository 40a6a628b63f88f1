// What is chosen, and what follows from it.
const MAX_NODES = 3000, MAX_EDGES = 15000, MAX_ROLLOUT_MATRIX = 150;
const byId = (id) => document.getElementById(id);
const state = {
  show: "weights", layer: 0, head: -1, node: layers[0].graph.space.start,
  threshold: 0, reach: 0, residual: 0.5, colour: "class",
  cursor: null, // the edge that the keyboard has reached among the neighbours
  hover: null, // the node, edge or cell under the pointer
};
const visited = [];
const remembered = new Map(); // the node selected in each space

/** Layers up to the chosen one, if each reads the output of the one before on the same nodes; else null. */
function through() {
  const { space } = layers[state.layer].graph;
  const first = layers.findIndex((layer) => layer.graph.space === space);
  const chosen = layers.slice(first, state.layer + 1);
  return space.shared && chosen.every((layer) => layer.graph.space === space) ? chosen : null;
}

const largestOf = (values) => values.reduce((most, value) => Math.max(most, value), 0) || 1;

/** Keeps the last result of a function of the state. */
function cached(keys, compute) {
  let kept, key;
  return () => {
    const now = keys().join();
    if (now !== key) [kept, key] = [compute(), now];
    return kept;
  };
}

/** The edges and values that are looked at: weights, a rollout as edges from inputs, or an attribution. */
const shownField = cached(
  () => [state.show, state.layer, state.head, ...(state.show === "weights" ? [] : [state.node, state.residual])],
  () => {
    const layer = layers[state.layer];
    if (state.show === "weights") {
      const values = layer.weights(state.head);
      return { graph: layer.graph, values, maximum: largestOf(values) };
    }
    if (state.show === "gatt") {
      const { graph, values } = attribution(through(), state.node);
      return { graph, values, maximum: largestOf(values) };
    }
    const { space } = layer.graph;
    const shares = rolloutRow(through(), state.node, state.residual);
    const isWhole = space.size <= MAX_ROLLOUT_MATRIX;
    const source = [], target = [], values = [];
    for (let node = isWhole ? 0 : state.node; node < (isWhole ? space.size : state.node + 1); node++) {
      const row = node === state.node ? shares : rolloutRow(through(), node, state.residual);
      row.forEach((share, input) => {
        if (share <= 0) return;
        source.push(input);
        target.push(node);
        values.push(share);
      });
    }
    return { graph: new Graph(space, source, target), values, maximum: largestOf(values), shares, maximumShare: largestOf(shares) };
  },
);

/** What the graph draws: in a rollout the edges that messages take, and shares as colours of the nodes. */
const drawnField = cached(
  () => [state.show, state.layer, state.head, state.node, state.residual],
  () => {
    const field = shownField();
    const { graph, weights } = layers[state.layer];
    if (!field.shares || graph.space.sequence) return field;
    return { graph, values: weights(-1), maximum: largestOf(weights(-1)), shares: field.shares, ignoresThreshold: true };
  },
);

const limit = () => (state.threshold * state.threshold) * shownField().maximum;

/** The nodes that are shown: all, or those from which messages reach the selected node. */
const shownNodes = cached(
  () => {
    const { graph } = layers[state.layer];
    return state.reach ? [graphs.indexOf(graph), state.reach, state.node] : [spaces.indexOf(graph.space)];
  },
  () => {
    const layer = layers[state.layer];
    const { graph } = layer;
    const mask = new Uint8Array(graph.space.size);
    if (!state.reach) return { mask: mask.fill(1), nodes: Uint32Array.from(mask.keys()) };
    const weights = layer.weights(-1);
    let count = 1, front = [state.node];
    mask[state.node] = 1;
    for (let hop = 0; hop < state.reach; hop++) {
      const edges = front.flatMap((node) => Array.from(graph.into(node))).sort((a, b) => weights[b] - weights[a]);
      front = [];
      for (const edge of edges) {
        if (mask[graph.source[edge]] || count >= MAX_NODES) continue;
        mask[graph.source[edge]] = 1;
        count++;
        front.push(graph.source[edge]);
      }
    }
    return { mask, nodes: Uint32Array.from(mask.keys()).filter((node) => mask[node]) };
  },
);
const isShown = (node) => Boolean(shownNodes().mask[node]);

const keptVisible = new WeakMap();
/** The edges at or above the threshold between nodes that are shown. */
function visible(field = shownField()) {
  const least = field.ignoresThreshold ? 0 : limit();
  const key = [least, state.layer, state.reach, state.reach ? state.node : ""].join();
  if (keptVisible.get(field)?.key !== key) {
    const { graph, values } = field;
    const { mask } = shownNodes();
    let edges = [];
    for (let edge = 0; edge < graph.size; edge++) {
      if (values[edge] >= least && (values[edge] > 0 || state.show !== "gatt") && mask[graph.source[edge]] && mask[graph.target[edge]]) edges.push(edge);
    }
    const isCut = edges.length > MAX_EDGES && !graph.space.sequence;
    if (isCut) edges = edges.sort((a, b) => values[b] - values[a]).slice(0, MAX_EDGES);
    keptVisible.set(field, { key, edges, isCut });
  }
  return keptVisible.get(field).edges;
}

/** The edges into the selected node at or above the threshold, heaviest first. */
function neighbours() {
  const { graph, values } = shownField();
  const least = limit();
  return Array.from(graph.into(state.node)).filter((edge) => values[edge] >= least).sort((a, b) => values[b] - values[a]);
}

const cursorNode = () => (state.cursor === null ? null : shownField().graph.source[state.cursor]);

/** How nodes are coloured, unless it is by class. */
const nodeWeights = cached(
  () => [state.show, state.colour, state.layer, state.head, state.node, state.residual],
  () => {
    const field = shownField();
    if (field.shares) return { values: field.shares, maximum: field.maximumShare };
    if (state.colour !== "weight") return null;
    const values = new Float64Array(field.graph.space.size);
    for (const edge of field.graph.into(state.node)) values[field.graph.source[edge]] = field.values[edge];
    return { values, maximum: largestOf(values) };
  },
);

const views = { graph: new GraphView(byId("graph")), matrix: new MatrixView(byId("matrix")) };
function invalidateViews() {
  views.graph.invalidate();
  views.matrix.invalidate();
}

let announcement;
function announce(words) {
  clearTimeout(announcement);
  announcement = setTimeout(() => (byId("status").textContent = words), 60); // only the last of many
}

/** Points at a node, edge or cell in all views. */
function hover(found, event) {
  const same = found?.node === state.hover?.node && found?.edge === state.hover?.edge;
  state.hover = found;
  const tooltip = byId("tooltip");
  tooltip.hidden = !found || !event || (found.node === undefined && found.edge === undefined);
  if (!tooltip.hidden) {
    tooltip.textContent = described(found);
    const { clientX: x, clientY: y } = event;
    tooltip.style.left = `${Math.min(x + 14, window.innerWidth - tooltip.offsetWidth - 8)}px`;
    tooltip.style.top = `${Math.min(y + 16, window.innerHeight - tooltip.offsetHeight - 8)}px`;
  }
  if (!same) invalidateViews();
}

function described({ node, edge }) {
  const { graph, values } = shownField();
  const { space } = graph;
  if (edge !== undefined) {
    const what = graph.name(edge) ? `\n${graph.name(edge)}` : "";
    return `${nodeName(space, graph.source[edge])} → ${nodeName(space, graph.target[edge])}${what}\n${number(values[edge])}`;
  }
  const lines = [nodeName(space, node)];
  if (space.classes) lines.push(data.classes[space.classes[node]]);
  const into = graph.into(state.node).find((other) => graph.source[other] === node);
  if (into !== undefined) lines.push(`${number(values[into])} for ${nodeName(space, state.node)}`);
  return lines.join("\n");
}

/** Changes what is chosen, and everything that follows from it. */
function change(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  const { space } = layers[state.layer].graph;
  const isOtherSpace = layers[before.layer].graph.space !== space;
  if (isOtherSpace) {
    remembered.set(layers[before.layer].graph.space, before.node);
    state.node = remembered.get(space) ?? space.start;
    visited.length = 0;
    setReach(space);
  }
  state.head = Math.min(state.head, layers[state.layer].heads - 1);
  if (!through() && state.show !== "weights") state.show = "weights";
  state.cursor = state.hover = null;
  views.matrix.cursor = null;
  update(isOtherSpace);
}

function select(node) {
  if (node === state.node) return;
  visited.push(state.node);
  change({ node });
  announce(`Selected ${nodeName(layers[state.layer].graph.space, node)}`);
}

/** Graphs that are too large to draw as a whole are shown around the selected node. */
function setReach(space) {
  const isLarge = space.size > MAX_NODES || (!space.sequence && layers.some(({ graph }) => graph.space === space && graph.size > MAX_EDGES));
  const field = byId("reach");
  field.options[0].disabled = isLarge;
  field.parentElement.hidden = space.sequence || !space.shared;
  if (isLarge && !state.reach) state.reach = 2;
  if (space.sequence || !space.shared) state.reach = 0;
}

let placed;
function update(isFirst = false) {
  const layer = layers[state.layer];
  const { graph } = layer;
  const { space } = graph;
  const { nodes } = shownNodes();
  if (isFirst || placed !== nodes) {
    views.graph.layout.place(graph, nodes);
    views.matrix.order(space, nodes);
    if (isFirst || state.reach || placed?.length !== nodes.length) for (const view of Object.values(views)) view.scaleBy(0);
    placed = nodes;
  }
  showControls(layer, space);
  showDetails();
  showLegend();
  const { graph: all } = shownField();
  const edges = visible();
  const cut = keptVisible.get(shownField()).isCut ? ", the heaviest" : "";
  const noun = { weights: "edge", rollout: "share", gatt: "edge" }[state.show];
  byId("shown").textContent = `Showing ${counted(edges.length, noun)} of ${counted(all.size, noun).split(" ")[0]}${cut}${state.reach ? `, ${counted(nodes.length, "node")}` : ""}.`;
  for (const [name, view] of Object.entries(views)) {
    view.canvas.setAttribute("aria-label", `${shownInWords()}, as a ${name}: ${counted(nodes.length, "node")}, ${counted(edges.length, noun)}. Selected: ${nodeName(space, state.node)}.`);
  }
  invalidateViews();
}

/** What is shown, for those who see only a picture, or none. */
const shownInWords = () => `${byId("show").selectedOptions[0].textContent}, ${layers[state.layer].name}, ${headName(state.show === "weights" ? state.head : -1)}, 0 to ${largestShown().toFixed(2)}`;

const largestShown = () => (state.show === "rollout" && !layers[state.layer].graph.space.sequence ? shownField().maximumShare : shownField().maximum);

const headName = (head) => (head < 0 ? "mean of heads" : `head ${head}`);

function showControls(layer, space) {
  const isSingle = state.show === "weights";
  byId("show").value = state.show;
  for (const option of byId("show").options) option.disabled = option.value !== "weights" && !through();
  byId("layer").value = state.layer;
  byId("layer-label").textContent = isSingle ? "Layer" : "Up to layer";
  byId("previous-layer").disabled = state.layer === 0;
  byId("next-layer").disabled = state.layer === layers.length - 1;
  byId("graph-heading").textContent = space.sequence ? "Arcs" : "Graph";
  byId("residual-field").hidden = state.show !== "rollout";
  byId("residual").value = state.residual;
  byId("residual-value").textContent = percent(state.residual);
  byId("threshold").value = state.threshold;
  byId("threshold-value").textContent = `≥ ${limit().toFixed(3)}`;
  byId("reach").value = state.reach;
  byId("colour-field").hidden = !space.classes || state.show === "rollout";
  byId("colour").value = state.colour;
  const heads = byId("heads");
  const wanted = layer.heads === 1 ? [0] : [-1, ...Array(layer.heads).keys()];
  if (heads.dataset.of !== String(layer.heads)) {
    heads.dataset.of = layer.heads;
    heads.replaceChildren(
      ...wanted.map((head) =>
        element("label", {}, element("input", { type: "radio", name: "head", value: head, "aria-label": headName(head) }), element("span", {}, head < 0 ? "mean" : String(head))),
      ),
    );
  }
  byId("head-field").hidden = !isSingle; // rollout and attribution average heads
  const chosen = layer.heads === 1 ? 0 : state.head;
  for (const input of heads.querySelectorAll("input")) input.checked = Number(input.value) === chosen;
}

function showLegend() {
  const legend = byId("legend");
  legend.replaceChildren();
  const scale = element("canvas", { width: 180, height: 24, "aria-hidden": "true" });
  scale.style.width = "90px";
  scale.style.height = "12px";
  const context = scale.getContext("2d");
  for (let x = 0; x < 180; x++) {
    const share = x / 179;
    context.fillStyle = theme.ramp(share);
    const height = 4 + 20 * share;
    context.fillRect(x, 12 - height / 2, 1, height);
  }
  const what = { weights: "weight", rollout: "share", gatt: "attribution" }[state.show];
  legend.append(element("span", { className: "scale" }, what, " 0", scale, largestShown().toFixed(2)));
  legend.append(...shownClasses().map(({ number, name }) => element("span", {}, classMark(number), name)));
}

/** The classes that nodes are coloured by, if they are. */
function shownClasses() {
  const { space } = layers[state.layer].graph;
  if (!space.classes || nodeWeights()) return [];
  const present = new Set(space.classes);
  return data.classes.map((name, number) => ({ name, number })).filter(({ number }) => present.has(number));
}

/** How many heads the layers have: "4 heads, then 1". */
function headCounts() {
  const counts = layers.map((layer) => layer.heads).filter((heads, place, all) => heads !== all[place - 1]);
  if (counts.length > 3) return `${Math.min(...counts)} to ${counted(Math.max(...counts), "head")}`;
  return [counted(counts[0], "head"), ...counts.slice(1)].join(", then ");
}

function showSummary() {
  const { graph } = layers[0];
  const parts = [counted(layers.length, "layer"), headCounts()];
  const kinds = graph.space.sequence ? "token" : "node";
  if (spaces.length === 1) parts.push(graph.space.shared ? counted(graph.space.size, kinds) : `${counted(graph.space.sources, "source")}, ${counted(graph.space.targets, "target")}`);
  if (spaces.length === 1 && !graph.space.sequence) parts.push(counted(graph.size, "edge"));
  if (data.batch.size > 1) parts.push(`element ${data.batch.element} of a batch of ${data.batch.size}`);
  if (data.hops) parts.push(`what reaches one node within ${counted(data.hops, "hop")}`);
  byId("summary").textContent = parts.join(" · ");
}

function showResults() {
  const field = byId("search"), list = byId("results");
  const query = field.value.trim().toLowerCase();
  const { space } = layers[state.layer].graph;
  const found = [];
  if (query) {
    for (let node = 0; node < space.size; node++) {
      const name = plainName(space, node).toLowerCase();
      const place = name.indexOf(query);
      if (place >= 0 || String(node) === query) found.push({ node, rank: String(node) === query || name === query ? -1 : place });
    }
    found.sort((a, b) => a.rank - b.rank || a.node - b.node).splice(8);
  }
  list.replaceChildren(
    ...found.map(({ node }, place) => {
      const item = element("li", { role: "option", id: `result-${place}`, "aria-selected": String(place === 0) }, space.names && space.shared && !space.typed ? `${plainName(space, node)} · ${node}` : nodeName(space, node));
      item.dataset.node = node;
      return item;
    }),
  );
  if (query && !found.length) list.append(element("li", { className: "none", role: "option", "aria-disabled": "true" }, "No node is called this."));
  list.hidden = !query;
  field.setAttribute("aria-expanded", String(Boolean(query)));
  if (found.length) field.setAttribute("aria-activedescendant", "result-0");
  else field.removeAttribute("aria-activedescendant");
}

function closeResults() {
  byId("search").value = "";
  showResults();
}

function stepLayer(steps) {
  const layer = Math.min(Math.max(state.layer + steps, 0), layers.length - 1);
  if (layer !== state.layer) change({ layer });
  announce(layers[layer].name);
}

function stepHead(steps) {
  const { heads } = layers[state.layer];
  if (state.show !== "weights" || heads === 1) return;
  change({ head: Math.min(Math.max(state.head + steps, -1), heads - 1) });
  announce(headName(state.head));
}

/** Goes through the neighbours of the selected node, heaviest first. */
function stepNeighbour(steps) {
  const edges = state.show === "gatt" ? neighbours().filter((edge) => shownField().values[edge] > 0) : neighbours();
  if (!edges.length) return;
  const place = edges.indexOf(state.cursor);
  const next = place < 0 ? (steps > 0 ? 0 : edges.length - 1) : (place + steps + edges.length) % edges.length;
  state.cursor = edges[next];
  const { graph, values } = shownField();
  for (const button of document.querySelectorAll("#details .bars button")) button.classList.toggle("cursor", Number(button.dataset.edge ?? -1) === state.cursor);
  announce(`${nodeName(graph.space, graph.source[state.cursor])}, ${number(values[state.cursor])}, neighbour ${next + 1} of ${edges.length}`);
  invalidateViews();
}

function goBack() {
  if (!visited.length) return;
  const node = visited.pop();
  change({ node });
  announce(`Back to ${nodeName(layers[state.layer].graph.space, node)}`);
}

function stepNode(to) {
  const { nodes } = shownNodes();
  const place = nodes.indexOf(state.node);
  const next = { Home: 0, End: nodes.length - 1, PageUp: place - 1, PageDown: place + 1 }[to];
  select(nodes[Math.min(Math.max(next, 0), nodes.length - 1)]);
}

function listen() {
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("show").addEventListener("change", (event) => change({ show: event.target.value }));
  byId("layer").addEventListener("change", (event) => change({ layer: Number(event.target.value) }));
  byId("previous-layer").addEventListener("click", () => stepLayer(-1));
  byId("next-layer").addEventListener("click", () => stepLayer(1));
  byId("heads").addEventListener("change", (event) => change({ head: layers[state.layer].heads === 1 ? -1 : Number(event.target.value) }));
  byId("residual").addEventListener("input", (event) => change({ residual: Number(event.target.value) }));
  byId("threshold").addEventListener("input", (event) => change({ threshold: Number(event.target.value) }));
  byId("reach").addEventListener("change", (event) => change({ reach: Number(event.target.value) }));
  byId("colour").addEventListener("change", (event) => change({ colour: event.target.value }));
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("overview-button").hidden = layers.every(({ heads }) => heads === 1) && layers.length === 1;
  byId("overview-button").addEventListener("click", showOverview);
  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", () => savePicture(button.dataset.view, button.dataset.save));
  }
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => views[button.dataset.view].scaleBy(Number(button.dataset.zoom)));
  }

  const search = byId("search"), results = byId("results");
  const choose = (item) => {
    if (!item?.dataset.node) return;
    closeResults();
    select(Number(item.dataset.node));
  };
  search.addEventListener("input", showResults);
  search.addEventListener("blur", () => setTimeout(() => (results.hidden = true), 150)); // after a click on a result
  results.addEventListener("pointerdown", (event) => choose(event.target.closest("li")));
  search.addEventListener("keydown", (event) => {
    const items = [...results.querySelectorAll("[data-node]")];
    const place = items.findIndex((item) => item.getAttribute("aria-selected") === "true");
    if (event.key === "Enter") choose(items[place]);
    else if (event.key === "Escape") closeResults();
    else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && items.length) {
      const next = (place + (event.key === "ArrowDown" ? 1 : -1) + items.length) % items.length;
      items.forEach((item, number) => item.setAttribute("aria-selected", String(number === next)));
      search.setAttribute("aria-activedescendant", items[next].id);
    } else return;
    event.preventDefault();
  });

  const arrows = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  for (const [name, view] of Object.entries(views)) {
    view.canvas.addEventListener("keydown", (event) => {
      const { key } = event;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.shiftKey && key in arrows) view.moveBy(40 * arrows[key][0], 40 * arrows[key][1]);
      else if (key === "+" || key === "=") view.scaleBy(1.3);
      else if (key === "-") view.scaleBy(1 / 1.3);
      else if (key === "0") view.scaleBy(0);
      else if (key === "Backspace") goBack();
      else if (name === "matrix" && key in arrows) view.step(-arrows[key][1], -arrows[key][0]);
      else if (name === "matrix" && key === "Enter" && view.cursor) select(view.rows[view.cursor.row]);
      else if (name === "graph" && key in arrows) stepNeighbour(key === "ArrowRight" || key === "ArrowDown" ? 1 : -1);
      else if (name === "graph" && key === "Enter" && state.cursor !== null) select(cursorNode());
      else if (name === "graph" && ["Home", "End", "PageUp", "PageDown"].includes(key)) stepNode(key);
      else return;
      event.preventDefault();
    });
    view.canvas.addEventListener("blur", () => view.invalidate());
  }
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.matches("input[type='text'], select")) return;
    const keys = {
      "[": () => stepLayer(-1),
      "]": () => stepLayer(1),
      ",": () => stepHead(-1),
      ".": () => stepHead(1),
      "/": () => search.focus(),
      o: () => byId("overview-button").click(),
      "?": () => byId("help").showModal(),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readTheme();
    update();
  });
}

byId("layer").append(...layers.map((layer, number) => element("option", { value: number }, layer.name)));
readTheme();
listen();
showSummary();
setReach(layers[0].graph.space);
update(true);
document.documentElement.dataset.ready = "true";

// For scripts, and for tests.
window.gattnExplorer = {
  state,
  radius: () => views.graph.radius(),
  place: (node) => views.graph.at(node),
  cell: (target, source) => [views.matrix.x(views.matrix.columnOf.get(source) + 0.5), views.matrix.y(views.matrix.rowOf.get(target) + 0.5)],
  field: () => ({ source: Array.from(shownField().graph.source), target: Array.from(shownField().graph.target), values: Array.from(shownField().values), shares: shownField().shares && Array.from(shownField().shares) }),
  visible: () => Array.from(visible()),
  draws: () => Object.fromEntries(Object.entries(views).map(([name, view]) => [name, view.draws])),
  isSettled: () => views.graph.layout.isSettled,
};
