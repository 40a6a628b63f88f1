// What is said about the selected node. All text is set as text, never as markup.
const FIRST_ROWS = 20;
const number = (value) => value.toFixed(4);
/** The end of a name, where those of layers differ. */
const ending = (text, length) => (text.length > length ? `…${text.slice(1 - length)}` : text);
/** Names without the parts at their ends that all of them share. */
function withoutCommonEnd(names) {
  const parts = names.map((name) => name.split("."));
  while (names.length > 1 && parts.every((some) => some.length > 1 && some.at(-1) === parts[0].at(-1))) parts.forEach((some) => some.pop());
  return parts.map((some) => some.join("."));
}

const percent = (share) => `${Math.round(100 * share)} %`;
const counted = (count, noun) => `${count.toLocaleString("en").replaceAll(",", "\u202f")} ${noun}${count === 1 ? "" : "s"}`;

/** An element with properties and children; strings become text. */
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && key !== "role") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A small canvas with the shape and colour of a class. */
function classMark(number) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = element("canvas", { width: 14 * ratio, height: 14 * ratio, "aria-hidden": "true" });
  canvas.style.width = canvas.style.height = "14px";
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.beginPath();
  trace(context, SHAPES[number % SHAPES.length], 7, 7.5, 4.8);
  context.fillStyle = classColour(number);
  context.fill();
  return canvas;
}

const markOf = (space, node) => (space.classes ? classMark(space.classes[node]) : null);

/** One row of a list: a name, a bar and a number. */
function barRow({ edge, node, words, label, value, maximum, uniform, mark }) {
  const bar = element("span", { className: "bar", "aria-hidden": "true" }, element("i"));
  bar.firstChild.style.width = `${(100 * value) / maximum}%`;
  if (uniform !== undefined) {
    const tick = element("u");
    tick.style.left = `${Math.min((100 * uniform) / maximum, 100)}%`;
    bar.append(tick);
  }
  const name = element("span", { className: "name", title: words }, mark, element("b", {}, words), label ? element("small", {}, label) : null);
  const button = element("button", { type: "button", tabIndex: -1 }, name, bar, element("span", { className: "value" }, number(value)));
  button.dataset.node = node;
  if (edge !== undefined) button.dataset.edge = edge;
  return element("li", {}, button);
}

/** A list of bars: arrow keys go through it, and pointing shows the edge in the pictures. */
function barList(rows, label, className = "bars") {
  const list = element("ol", { className, "aria-label": label });
  const add = (some) => list.append(...some.map(barRow));
  add(rows.slice(0, FIRST_ROWS));
  if (list.firstChild) list.firstChild.firstChild.tabIndex = 0;
  list.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) select(Number(button.dataset.node));
  });
  const point = (event) => {
    const button = event.target.closest("button");
    hover(button && { node: Number(button.dataset.node), ...(button.dataset.edge && { edge: Number(button.dataset.edge) }) });
  };
  list.addEventListener("pointerover", point);
  list.addEventListener("focusin", point);
  for (const event of ["pointerleave", "focusout"]) list.addEventListener(event, () => hover(null));
  list.addEventListener("keydown", (event) => {
    const steps = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!steps) return;
    event.preventDefault();
    const buttons = [...list.querySelectorAll("button")];
    const next = buttons[buttons.indexOf(document.activeElement) + steps];
    if (!next) return;
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  if (rows.length <= FIRST_ROWS) return [list];
  const more = element("button", { type: "button", className: "more" }, `Show all ${rows.length}`);
  more.addEventListener("click", () => {
    more.remove();
    add(rows.slice(FIRST_ROWS));
  });
  return [list, more];
}

const heading = (words, small) => element("h3", {}, words, small ? " " : null, small ? element("small", {}, small) : null);

function showDetails() {
  const { graph } = layers[state.layer];
  const { space } = graph;
  const { node } = state;
  const into = graph.into(node);
  const name = document.getElementById("node-name");
  name.replaceChildren(...[markOf(space, node), nodeName(space, node)].filter(Boolean));
  const kind = space.sequence ? "token" : "node";
  const isSource = !space.shared && node < space.sources;
  document.getElementById("node-kind").textContent = isSource ? `Selected ${kind}, a source` : `Selected ${kind}`;
  const hasItself = space.shared && into.some((edge) => graph.source[edge] === node);
  const facts = [space.classes ? data.classes[space.classes[node]] : null];
  if (space.names && space.shared && !space.typed) facts.push(`number ${node}`);
  facts.push(isSource ? `attended to by ${counted(graph.source.filter((source) => source === node).length, "target")}` : (space.sequence ? `attends to ${counted(into.length, "token")}` : counted(into.length, "neighbour")) + (hasItself ? ", itself included" : ""));
  document.getElementById("node-facts").textContent = facts.filter(Boolean).join(" · ");
  const shown = { weights: weightDetails, rollout: rolloutDetails, gatt: attributionDetails }[state.show];
  const details = document.getElementById("details");
  const held = details.contains(document.activeElement);
  details.replaceChildren(...shown(graph, node, into));
  if (held) details.querySelector("[tabindex='0'], button")?.focus();
}

function weightDetails(graph, node, into) {
  const { space } = graph;
  const { values } = shownField();
  if (!into.length) {
    const why =
      !space.shared && node < space.sources
        ? "A source attends to nothing here: select a target."
        : data.hops
          ? `Its neighbours were not kept, since this page has what reaches one node within ${counted(data.hops, "hop")}.`
          : "It has no neighbours in this layer, and receives no messages.";
    return [element("p", { className: "note" }, why)];
  }
  const { nats, uniform } = entropy(values, into);
  const meter = element("div", { className: "meter", role: "meter", "aria-label": "Entropy relative to uniform", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(uniform > 0 ? (100 * nats) / uniform : 100) }, element("i"));
  meter.firstChild.style.width = uniform > 0 ? `${(100 * nats) / uniform}%` : "100%";
  const relative = uniform > 0 ? `${percent(nats / uniform)} of uniform` : "no choice";
  const maximum = into.reduce((most, edge) => Math.max(most, values[edge]), 1 / into.length);
  const rows = neighbours().map((edge) => ({
    edge,
    node: graph.source[edge],
    words: nodeName(space, graph.source[edge]),
    label: [graph.name(edge), space.shared && graph.source[edge] === node ? "itself" : ""].filter(Boolean).join(", "),
    value: values[edge],
    maximum,
    uniform: 1 / into.length,
    mark: markOf(space, graph.source[edge]),
  }));
  const hidden = into.length - rows.length;
  return [
    heading("Entropy", `${nats.toFixed(2)} of ${uniform.toFixed(2)} nats, ${relative}`),
    meter,
    heading(space.sequence ? "Attends to" : "Neighbours by weight", hidden ? `(${hidden} below the threshold)` : ""),
    ...barList(rows, "Neighbours by weight"),
    element("p", { className: "key", "aria-hidden": "true" }, element("span", {}, element("i"), "weight"), element("span", {}, element("u"), `uniform, 1/${into.length} = ${number(1 / into.length)}`)),
    ...headsTable(node),
  ];
}

/** The relative entropy of a node in all heads of all layers, which also switches to them. */
function headsTable(node) {
  const { space } = layers[state.layer].graph;
  const here = layers.map((layer, number) => ({ layer, number })).filter(({ layer }) => layer.graph.space === space && layer.graph.into(node).length > 1);
  const most = Math.max(...here.map(({ layer }) => layer.heads));
  if (!here.length || (here.length === 1 && most === 1)) return [];
  const table = element("table", { className: "heads-table" });
  table.append(element("tr", {}, element("td"), ...Array.from({ length: most }, (_, head) => element("th", { scope: "col" }, String(head)))));
  const names = withoutCommonEnd(here.map(({ layer }) => layer.name));
  for (const [place, { layer, number }] of here.entries()) {
    const cells = Array.from({ length: layer.heads }, (_, head) => {
      const into = layer.graph.into(node);
      const { nats, uniform } = entropy(layer.weights(head), into);
      const share = nats / uniform;
      const button = element("button", { type: "button", "aria-pressed": String(number === state.layer && (head === state.head || layer.heads === 1)), "aria-label": `${layer.name}, head ${head}: entropy ${percent(share)} of uniform` }, String(Math.round(100 * share)));
      const colour = theme.ramp(1 - share);
      button.style.background = colour;
      button.style.color = readable(colour);
      button.addEventListener("click", () => change({ layer: number, head }));
      return element("td", {}, button);
    });
    table.append(element("tr", {}, element("th", { scope: "row", title: layer.name }, ending(names[place], 14)), ...cells));
  }
  return [heading("Entropy by layer and head", "% of uniform"), element("div", { className: "scroller" }, table)];
}

function rolloutDetails(graph, node) {
  const { shares } = shownField();
  const { space } = graph;
  const rows = Array.from(shares, (value, other) => ({ value, node: other, words: nodeName(space, other), label: other === node ? "itself" : "", mark: markOf(space, other) }))
    .filter(({ value }) => value > 0)
    .sort((a, b) => b.value - a.value);
  const maximum = rows[0]?.value || 1;
  return [
    element("p", { className: "note" }, `The share of each input in the output after ${counted(through().length, "layer")}, heads averaged.`),
    heading("Inputs by share", `(${rows.length})`),
    ...barList(rows.map((row) => ({ ...row, maximum })), "Inputs by share"),
  ];
}

function attributionDetails(graph, node) {
  const { graph: all, values, maximum } = shownField();
  const { space } = graph;
  const rows = Array.from(visible())
    .filter((edge) => values[edge] > 0)
    .sort((a, b) => values[b] - values[a])
    .slice(0, 200)
    .map((edge) => ({ edge, node: all.source[edge], words: `${nodeName(space, all.source[edge])} → ${nodeName(space, all.target[edge])}`, label: all.name(edge), value: values[edge], maximum }));
  return [
    element("p", { className: "note" }, `The part of each edge in the output after ${counted(through().length, "layer")}: products of weights along the paths to the selected node, heads averaged.`),
    heading("Computation tree", "weight, product to the root"),
    computationTree(through(), node),
    heading("Edges by attribution"),
    ...barList(rows, "Edges by attribution", "bars pairs"),
  ];
}

/** The computation tree of a node, opened branch by branch. */
function computationTree(layersThrough, root) {
  const { space } = layersThrough[0].graph;
  const branch = (node, depth, product, alpha) => {
    const layer = layersThrough[depth - 1];
    const into = layer ? layer.graph.into(node) : [];
    const item = element("li", { role: "treeitem", tabIndex: -1, "aria-label": alpha === null ? `${nodeName(space, node)}, the root` : `${nodeName(space, node)}, weight ${number(alpha)}, product ${number(product)}` });
    const twig = element("span", { className: "twig", "aria-hidden": "true" }, into.length ? "▸" : "");
    item.append(
      element("div", { className: "row" }, twig, markOf(space, node), element("span", { className: "name", title: nodeName(space, node) }, nodeName(space, node)), element("span", { className: "alpha" }, alpha === null ? "" : number(alpha)), element("span", { className: "product" }, number(product))),
    );
    if (into.length) item.setAttribute("aria-expanded", "false");
    item.open = (isOpen) => {
      if (!into.length) return;
      if (isOpen && !item.querySelector("ul")) {
        const weights = layer.weights(-1);
        const sorted = Array.from(into).sort((a, b) => weights[b] - weights[a]);
        const group = element("ul", { role: "group" });
        const grow = (count) => {
          for (const edge of sorted.splice(0, count)) group.append(branch(layer.graph.source[edge], depth - 1, product * weights[edge], weights[edge]));
          if (sorted.length) {
            const rest = element("li", { role: "treeitem", tabIndex: -1, "aria-label": `${sorted.length} more` }, element("div", { className: "row" }, element("span", { className: "twig" }), element("span", { className: "alpha" }, `${sorted.length} more`)));
            rest.open = () => {
              rest.remove();
              grow(50);
            };
            group.append(rest);
          }
        };
        grow(12);
        item.append(group);
      }
      const group = item.querySelector("ul");
      if (group) group.hidden = !isOpen;
      item.setAttribute("aria-expanded", String(isOpen));
      twig.textContent = isOpen ? "▾" : "▸";
    };
    return item;
  };
  const tree = element("ul", { className: "tree", role: "tree", "aria-label": "Computation tree" }, branch(root, layersThrough.length, 1, null));
  tree.firstChild.tabIndex = 0;
  tree.firstChild.open(true);
  const first = tree.querySelector("ul > li");
  first?.open?.(true);
  const isOpen = (item) => item.getAttribute("aria-expanded") === "true";
  const go = (item) => {
    if (!item) return;
    for (const other of tree.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    item.tabIndex = 0;
    item.focus();
  };
  tree.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (!item) return;
    item.open(!isOpen(item));
    if (item.isConnected) go(item);
  });
  tree.addEventListener("keydown", (event) => {
    const items = [...tree.querySelectorAll("[role='treeitem']")].filter((item) => !item.closest("ul[hidden]"));
    const item = document.activeElement.closest("li");
    const place = items.indexOf(item);
    const keys = {
      ArrowDown: () => go(items[place + 1]),
      ArrowUp: () => go(items[place - 1]),
      ArrowRight: () => (isOpen(item) ? go(items[place + 1]) : item.open(true)),
      ArrowLeft: () => (isOpen(item) ? item.open(false) : go(item.parentElement.closest("li"))),
      Enter: () => item.open(!isOpen(item)),
      Home: () => go(items[0]),
      End: () => go(items.at(-1)),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
    if (!item.isConnected) go(items[place - 1]);
  });
  return tree;
}
