// The two pictures have in common: a canvas that is drawn when something changed, zoom, and colours.
const BINS = 16; // edges are drawn together by weight, which is what makes thousands of them fast
const SKETCHED_EDGES = 4000;
const SHAPES = ["circle", "square", "triangle", "diamond", "cross", "pentagon", "wedge", "star"];

const theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "raised", "line", "text", "soft", "accent", "mark", "node", "node-line", "faint"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  const stops = [0, 1, 2, 3, 4].map((stop) => style.getPropertyValue(`--ramp-${stop}`).trim());
  theme.ramp = (share) => {
    const place = Math.min(Math.max(share, 0), 1) * 4;
    const stop = Math.min(Math.floor(place), 3);
    return d3.interpolateRgb(stops[stop], stops[stop + 1])(place - stop);
  };
  theme.bins = Array.from({ length: BINS }, (_, bin) => theme.ramp(bin / (BINS - 1)));
  theme.font = getComputedStyle(document.body).fontFamily;
}

const binOf = (share) => Math.min(BINS - 1, Math.floor(share * BINS));
const classColour = (number) => data.colours[number % data.colours.length];

/** Adds a mark to a path; classes differ by shape as well as by colour. */
function trace(context, shape, x, y, r) {
  const polygon = (corners, turn, size, inner = 0) => {
    const count = inner ? 2 * corners : corners;
    for (let i = 0; i < count; i++) {
      const angle = turn + (2 * Math.PI * i) / count;
      const radius = size * (inner && i % 2 ? inner : 1);
      context[i ? "lineTo" : "moveTo"](x + radius * Math.cos(angle), y + radius * Math.sin(angle));
    }
    context.closePath();
  };
  if (shape === "square") context.rect(x - 0.86 * r, y - 0.86 * r, 1.72 * r, 1.72 * r);
  else if (shape === "triangle") polygon(3, -Math.PI / 2, 1.3 * r);
  else if (shape === "diamond") polygon(4, 0, 1.25 * r);
  else if (shape === "cross") polygon(4, Math.PI / 4, 1.3 * r, 0.4);
  else if (shape === "pentagon") polygon(5, -Math.PI / 2, 1.12 * r);
  else if (shape === "wedge") polygon(3, Math.PI / 2, 1.3 * r);
  else if (shape === "star") polygon(5, -Math.PI / 2, 1.4 * r, 0.5);
  else {
    context.moveTo(x + r, y);
    context.arc(x, y, r, 0, 2 * Math.PI);
  }
}

function drawShape(context, shape, x, y, r, colour, line) {
  context.beginPath();
  trace(context, shape, x, y, r);
  context.fillStyle = colour;
  context.fill();
  context.lineWidth = r > 4 ? 1 : 0.5;
  context.strokeStyle = line;
  context.stroke();
}

const stamps = new Map();
/** A small picture of a node, since copying it is much faster than tracing thousands of shapes. */
function stamp(shape, r, colour, line) {
  const ratio = window.devicePixelRatio || 1;
  const key = [shape, r.toFixed(1), colour, line, ratio].join();
  if (!stamps.has(key)) {
    if (stamps.size > 500) stamps.clear(); // each step of zoom makes others
    const half = 1.4 * r + 2;
    const image = element("canvas", { width: Math.ceil(2 * half * ratio), height: Math.ceil(2 * half * ratio) });
    const context = image.getContext("2d");
    context.scale(image.width / (2 * half), image.height / (2 * half));
    drawShape(context, shape, half, half, r, colour, line);
    stamps.set(key, { image, half });
  }
  return stamps.get(key);
}

class View {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.draws = 0;
    this.transform = d3.zoomIdentity;
    this.zoom = d3
      .zoom()
      .scaleExtent([0.5, 60])
      .on("zoom", ({ transform }) => {
        this.transform = transform;
        clearTimeout(this.moving);
        this.moving = setTimeout(() => {
          this.moving = null;
          if (this.isSketch) this.invalidate();
        }, 150);
        this.invalidate();
      });
    d3.select(canvas).call(this.zoom).on("dblclick.zoom", null);
    new ResizeObserver(() => this.invalidate()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => hover(null));
    canvas.addEventListener("click", (event) => this.click(...this.place(event)));
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  point(event) {
    if (event.buttons) return; // moving the picture
    const found = this.hit(...this.place(event));
    this.canvas.classList.toggle("pointing", Boolean(found));
    hover(found, event);
  }

  /** Asks for one drawing in the next frame, however many changes there were. */
  invalidate() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      const { clientWidth: width, clientHeight: height } = this.canvas;
      if (!width || !height) return;
      const ratio = window.devicePixelRatio || 1;
      if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
        this.canvas.width = Math.round(width * ratio);
        this.canvas.height = Math.round(height * ratio);
      }
      Object.assign(this, { width, height });
      this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.context.clearRect(0, 0, width, height);
      this.context.font = `12px ${theme.font}`;
      this.draws++;
      this.draw(this.context);
    });
  }

  scaleBy(factor) {
    const selection = d3.select(this.canvas);
    if (factor === 0) this.zoom.transform(selection, d3.zoomIdentity);
    else this.zoom.scaleBy(selection, factor);
  }

  moveBy(x, y) {
    this.zoom.translateBy(d3.select(this.canvas), x / this.transform.k, y / this.transform.k);
  }

  text(words, x, y, { align = "center", colour = theme.text, halo = true, angle = 0, bold = false, size = 12 } = {}) {
    const { context } = this;
    context.save();
    context.translate(x, y);
    context.rotate(angle);
    context.font = `${bold ? "600 " : ""}${size}px ${theme.font}`;
    context.textAlign = align;
    context.textBaseline = "middle";
    if (halo) {
      context.lineJoin = "round";
      context.lineWidth = 3;
      context.strokeStyle = theme.ground;
      context.strokeText(words, 0, 0);
    }
    context.fillStyle = colour;
    context.fillText(words, 0, 0);
    context.restore();
  }
}

/** The graph, or the arcs over a sequence. */
class GraphView extends View {
  constructor(canvas) {
    super(canvas);
    this.layout = new Layout(
      () => this.invalidate(),
      () => canvas.clientHeight > canvas.clientWidth,
    );
  }

  /** Fits all nodes into the picture; zooming starts from there. */
  fit() {
    const { space } = this.layout;
    if (space.sequence) {
      this.sequence = sequenceGeometry(this, space);
      return;
    }
    const [left, top, right, bottom] = this.layout.bounds();
    const margin = 34;
    const width = Math.max(right - left, 1e-9), height = Math.max(bottom - top, 1e-9);
    const roomy = space.pos ? Infinity : 1.8; // a few nodes need not fill the picture
    const k = Math.min((this.width - 2 * margin) / width, (this.height - 2 * margin) / height, roomy);
    this.base = { k, x: this.width / 2 - (k * (left + right)) / 2, y: this.height / 2 - (k * (top + bottom)) / 2 };
  }

  /** Where a node is on the canvas. */
  at(node) {
    const { transform: t } = this;
    if (this.layout.space.sequence) return tokenPlace(this, node);
    const { base, layout } = this;
    return [t.applyX(base.x + base.k * layout.x[node]), t.applyY(base.y + base.k * layout.y[node])];
  }

  /** Whether the selected node and its neighbours must stand out against many others. */
  isCrowded() {
    return this.layout.nodes.length > 400;
  }

  radius() {
    const count = this.layout.nodes.length;
    const usual = count <= 40 ? 10 : count <= 120 ? 7.5 : count <= 500 ? 5 : 3;
    const spacing = Math.sqrt((this.width * this.height) / count); // on small screens, nodes are smaller
    return Math.min(usual, Math.max(spacing / 9, 3)) * Math.min(Math.max(Math.sqrt(this.transform.k), 0.7), 2.6);
  }

  hit(x, y) {
    const { layout, transform, base } = this;
    if (layout.space.sequence) return hitToken(this, x, y);
    if (!base) return null;
    const scale = base.k * transform.k;
    const [worldX, worldY] = [(transform.invertX(x) - base.x) / base.k, (transform.invertY(y) - base.y) / base.k];
    const node = layout.nearest(worldX, worldY, (this.radius() + 6) / scale);
    if (node !== null) return { node };
    const edges = visible();
    return edges.length > 2500 || drawnField() !== shownField() ? null : this.hitEdge(edges, x, y);
  }

  hitEdge(edges, x, y) {
    const { graph } = shownField();
    let [nearest, least] = [null, 5];
    for (const edge of edges) {
      if (graph.source[edge] === graph.target[edge]) continue;
      const curve = this.curve(graph.source[edge], graph.target[edge]);
      for (let part = 1; part < 8; part++) {
        const [px, py] = onCurve(curve, part / 8);
        const distance = Math.hypot(px - x, py - y);
        if (distance < least) [nearest, least] = [edge, distance];
      }
    }
    return nearest === null ? null : { edge: nearest };
  }

  /** An edge as a slight curve, which keeps its two directions apart: `[x0, y0, x, y, x1, y1]`. */
  curve(source, target) {
    const [x0, y0] = this.at(source), [x1, y1] = this.at(target);
    const bend = this.isBent ? 0.12 : 0;
    return [x0, y0, (x0 + x1) / 2 - bend * (y1 - y0), (y0 + y1) / 2 + bend * (x1 - x0), x1, y1];
  }

  click(x, y) {
    const found = this.hit(x, y);
    if (!found) return;
    select(found.node ?? shownField().graph.target[found.edge]);
  }

  draw(context) {
    if (!this.layout.space) return;
    this.fit();
    if (this.layout.space.sequence) drawArcs(this, context);
    else this.drawGraph(context);
  }

  drawGraph(context) {
    const { graph, values, maximum, shares } = drawnField();
    const edges = visible(drawnField());
    const { node: selected } = state;
    const isSmall = edges.length <= 400;
    this.isBent = edges.length <= 2500;
    const radius = this.radius();
    const loops = new Map();
    const bins = Array.from({ length: BINS }, () => []);
    const chosen = [];
    const named = new Set([selected]);
    for (const edge of edges) {
      const source = graph.source[edge], target = graph.target[edge];
      const share = values[edge] / maximum;
      if (source === target) loops.set(source, Math.max(share, loops.get(source) ?? 0));
      else if (target === selected && !shares) {
        chosen.push(edge);
        if (chosen.length < 40) named.add(source);
      } else bins[binOf(share)].push(edge);
    }
    context.lineCap = "round";
    // While the picture moves, the lightest of many edges are left out.
    this.isSketch = Boolean(this.moving) && edges.length > SKETCHED_EDGES;
    for (let bin = BINS - 1, count = 0; this.isSketch && bin >= 0; bin--) {
      bins[bin].splice(Math.max(SKETCHED_EDGES - count, 0));
      count += bins[bin].length;
    }
    const fade = shares ? 0.35 : isSmall ? 0.55 : 0.4;
    bins.forEach((members, bin) => {
      if (!members.length) return;
      context.globalAlpha = fade;
      context.strokeStyle = shares ? theme["node-line"] : theme.bins[bin];
      context.lineWidth = shares ? 0.8 : (isSmall ? 0.8 : 0.5) + (isSmall ? 3 : 1.8) * (bin / (BINS - 1));
      context.beginPath();
      for (const edge of members) this.line(context, this.curve(graph.source[edge], graph.target[edge]));
      context.stroke();
      if (isSmall && !shares) for (const edge of members) this.arrow(context, graph, edge, radius, 3 + 3 * (bin / BINS));
    });
    context.globalAlpha = 1;
    chosen.sort((a, b) => values[a] - values[b]);
    const least = this.isCrowded() ? 0.75 : 0.4; // the lightest of the highlighted edges
    for (const edge of chosen) {
      const share = values[edge] / maximum;
      this.highlighted(context, graph, edge, radius, theme.ramp(least + (1 - least) * share), 2 * least + 0.6 + 4.5 * share);
    }
    for (const edge of shares ? [] : [state.hover?.edge, state.cursor]) {
      if (edge !== undefined && edge !== null && graph.source[edge] !== graph.target[edge]) {
        if (isShown(graph.source[edge]) && isShown(graph.target[edge])) this.highlighted(context, graph, edge, radius, theme.mark, 2.5);
      }
    }
    this.drawNodes(context, radius, loops, new Set([selected, ...chosen.map((edge) => graph.source[edge])]));
    const taken = this.drawNames(named, radius);
    if (!graph.names || chosen.length > 14) return;
    for (const edge of chosen) {
      const curve = this.curve(graph.source[edge], graph.target[edge]);
      const words = shortened(graph.name(edge), 16);
      const room = Math.hypot(curve[4] - curve[0], curve[5] - curve[1]) - 2.5 * radius;
      const [x, y] = onCurve(curve, 0.45);
      if (words && room > 6 * words.length && isFree(taken, x, y, words)) this.text(words, x, y, { size: 11, colour: theme.soft });
    }
  }

  line(context, [x0, y0, x, y, x1, y1]) {
    if (Math.max(x0, x1) < 0 || Math.min(x0, x1) > this.width || Math.max(y0, y1) < 0 || Math.min(y0, y1) > this.height) return;
    context.moveTo(x0, y0);
    if (this.isBent) context.quadraticCurveTo(x, y, x1, y1);
    else context.lineTo(x1, y1);
  }

  highlighted(context, graph, edge, radius, colour, width) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    this.line(context, this.curve(graph.source[edge], graph.target[edge]));
    context.stroke();
    this.arrow(context, graph, edge, radius * (graph.target[edge] === state.node ? 1.45 : 1), 5 + width);
  }

  arrow(context, graph, edge, radius, size) {
    const [, , x, y, x1, y1] = this.curve(graph.source[edge], graph.target[edge]);
    const length = Math.hypot(x1 - x, y1 - y);
    if (length < radius + size) return;
    const [dx, dy] = [(x1 - x) / length, (y1 - y) / length];
    const [tipX, tipY] = [x1 - dx * (radius + 1), y1 - dy * (radius + 1)];
    context.fillStyle = context.strokeStyle;
    context.beginPath();
    context.moveTo(tipX, tipY);
    context.lineTo(tipX - size * dx - 0.5 * size * dy, tipY - size * dy + 0.5 * size * dx);
    context.lineTo(tipX - size * dx + 0.5 * size * dy, tipY - size * dy - 0.5 * size * dx);
    context.fill();
  }

  drawNodes(context, radius, loops, foreground) {
    const { space } = this.layout;
    const groups = new Map(); // nodes of one colour and shape are drawn together
    const fill = nodeFill();
    const isCrowded = this.isCrowded();
    for (const node of this.layout.nodes) {
      const shape = SHAPES[(space.classes ? space.classes[node] : 0) % SHAPES.length];
      const key = `${Number(isCrowded && foreground.has(node))} ${shape} ${fill(node)}`;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(node);
    }
    for (const [key, members] of [...groups].sort(([a], [b]) => a.localeCompare(b))) {
      const [isInFront, shape] = key.split(" ", 2);
      const colour = key.slice(shape.length + 3);
      const r = radius * (isInFront === "1" ? 1.9 : 1);
      const line = fill.isClass ? theme.ground : theme["node-line"];
      context.globalAlpha = isCrowded && isInFront === "0" && !nodeWeights() ? 0.6 : 1;
      const usual = context.isSharp || stamp(shape, r, colour, line);
      for (const node of members) {
        const [x, y] = this.at(node);
        if (x < -20 || y < -20 || x > this.width + 20 || y > this.height + 20) continue;
        if (context.isSharp) {
          drawShape(context, shape, x, y, node === state.node ? 1.45 * r : r, colour, line);
          continue;
        }
        const { image, half } = node === state.node ? stamp(shape, 1.45 * r, colour, line) : usual;
        context.drawImage(image, x - half, y - half, 2 * half, 2 * half);
      }
    }
    context.globalAlpha = 1;
    for (const [node, share] of loops) {
      if (radius < 4 && node !== state.node) continue;
      const [x, y] = this.at(node);
      const shape = SHAPES[(space.classes ? space.classes[node] : 0) % SHAPES.length];
      context.lineWidth = 0.8 + 3.4 * share;
      context.strokeStyle = theme.ramp(0.25 + 0.75 * share);
      context.beginPath();
      trace(context, shape, x, y, (node === state.node ? 1.45 * radius : radius) + 0.5 + context.lineWidth / 2 + (fill.isClass ? 1 : 0));
      context.stroke();
    }
    for (const [node, colour] of [[state.hover?.node, theme.soft], [cursorNode(), theme.mark], [state.node, theme.text]]) {
      if (node === undefined || node === null || !isShown(node)) continue;
      const [x, y] = this.at(node);
      context.lineWidth = 2;
      context.strokeStyle = colour;
      context.beginPath();
      context.arc(x, y, (node === state.node ? 1.45 * radius : radius) + 6.5, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  drawNames(named, radius) {
    const { space, nodes } = this.layout;
    const inPicture = Array.from(nodes).filter((node) => {
      const [x, y] = this.at(node);
      return x > 0 && y > 0 && x < this.width && y < this.height;
    });
    const all = inPicture.length <= 60 || (nodes.length <= 60 && this.transform.k >= 1);
    if ((named.size > 16 || (this.isCrowded() && this.transform.k < 2)) && !all) named = new Set([state.node]);
    const fill = nodeFill();
    const taken = []; // names do not cover one another; the selected node's comes first
    const first = (node) => (node === state.node ? 0 : node === state.hover?.node || node === cursorNode() ? 1 : named.has(node) ? 2 : 3);
    for (const node of inPicture.filter((node) => all || first(node) < 3).sort((a, b) => first(a) - first(b))) {
      const [x, y] = this.at(node);
      const isSelected = node === state.node;
      const name = shortened(plainName(space, node), 22);
      const r = isSelected ? 1.45 * radius : radius;
      if (name.length <= 3 && r >= (name.length < 3 ? 7.5 : 9)) {
        this.text(name, x, y + 0.5, { halo: false, colour: readable(fill(node)), bold: isSelected, size: name.length < 3 ? Math.min(1.3 * r, 11) : 9.5 });
        continue;
      }
      const below = y + r + (isSelected ? 15 : 9);
      if (isFree(taken, x, below, name)) this.text(name, x, below, { bold: isSelected, size: isSelected ? 12.5 : 11.5 });
    }
    return taken;
  }
}

/** Takes the place of a text if no other text covers it. */
function isFree(taken, x, y, words) {
  const half = 3.4 * words.length;
  const box = [x - half, y - 7, x + half, y + 7];
  if (taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1])) return false;
  taken.push(box);
  return true;
}

const onCurve = ([x0, y0, x, y, x1, y1], t) => [
  (1 - t) * (1 - t) * x0 + 2 * t * (1 - t) * x + t * t * x1,
  (1 - t) * (1 - t) * y0 + 2 * t * (1 - t) * y + t * t * y1,
];

/** Black or white, whichever can be read on a colour. */
function readable(colour) {
  const { r, g, b } = d3.rgb(colour);
  return 0.299 * r + 0.587 * g + 0.114 * b < 140 ? "#ffffff" : "#000000";
}

/** How nodes are filled: by class, or by their weight in the selection. */
function nodeFill() {
  const { space } = layers[state.layer].graph;
  const weights = nodeWeights();
  if (weights) return (node) => theme.ramp(weights.maximum ? weights.values[node] / weights.maximum : 0);
  const fill = (node) => (space.classes ? classColour(space.classes[node]) : theme.node);
  fill.isClass = Boolean(space.classes);
  return fill;
}
