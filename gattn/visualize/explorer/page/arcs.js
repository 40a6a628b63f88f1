// Sequences: tokens on a line with arcs over it, or two lines with curves between them.
const TOKEN_FONT = 12.5;

/** How far apart tokens are, and where their lines run. */
function sequenceGeometry(view, space) {
  const { context, width, height } = view;
  context.font = `${TOKEN_FONT}px ${theme.font}`;
  const longest = Math.max(...Array.from({ length: space.size }, (_, node) => context.measureText(shortened(plainName(space, node), 18)).width));
  const columns = Math.max(space.sources, space.targets);
  const step = (width - 60) / Math.max(columns, 1);
  const isTurned = longest + 4 > step * view.transform.k;
  const room = isTurned ? longest * 0.8 + 22 : 34;
  const { graph } = shownField();
  const isDown = space.shared && graph.source.some((source, edge) => source > graph.target[edge]);
  const line = space.shared ? (isDown ? height / 2 : height - room - 12) : null;
  return { step, isTurned, room, line, isDown, top: room + 14, bottom: height - room - 14 };
}

/** Where a token's dot is. */
function tokenPlace(view, node) {
  const { space } = view.layout;
  const { step, line, top, bottom } = view.sequence;
  const isTarget = !space.shared && node >= space.sources;
  const place = isTarget ? node - space.sources : node;
  const count = space.shared ? space.size : isTarget ? space.targets : space.sources;
  const columns = Math.max(space.sources, space.targets);
  const x = view.transform.applyX(30 + step * (place + 0.5 + (columns - count) / 2));
  return [x, space.shared ? line : isTarget ? bottom : top];
}

function hitToken(view, x, y) {
  const { space } = view.layout;
  if (!view.sequence) return null;
  let [nearest, least] = [null, Math.max(0.5 * view.sequence.step * view.transform.k, 8)];
  for (let node = 0; node < space.size; node++) {
    const [px, py] = tokenPlace(view, node);
    if (!space.shared && Math.abs(py - y) > view.height / 3) continue;
    if (space.shared && !view.sequence.isDown && y < view.sequence.line - 60) continue;
    if (space.shared && view.sequence.isDown && Math.abs(y - view.sequence.line) > 60) continue;
    if (Math.abs(px - x) < least) [nearest, least] = [node, Math.abs(px - x)];
  }
  return nearest === null ? null : { node: nearest };
}

function drawArcs(view, context) {
  const { graph, values, maximum } = shownField();
  const { space } = view.layout;
  const { step, isTurned, line, isDown, top, bottom } = view.sequence;
  const hovered = state.hover?.node;
  const focus = hovered !== undefined && hovered !== null && (space.shared || hovered >= space.sources) ? hovered : state.node;
  const asSource = hovered !== undefined && hovered !== null && !space.shared && hovered < space.sources ? hovered : null;
  const isChosen = (edge) => (asSource === null ? graph.target[edge] === focus : graph.source[edge] === asSource);
  const up = line - 34, down = view.height - line - view.sequence.room - 6;
  const across = Math.max(space.size - 1, 1) * step * view.transform.k;
  const draw = (edge, colour, width) => {
    const [x0, y0] = tokenPlace(view, graph.source[edge]), [x1, y1] = tokenPlace(view, graph.target[edge]);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    if (!space.shared) {
      context.moveTo(x0, y0 + 8);
      context.bezierCurveTo(x0, y0 + 0.4 * (y1 - y0), x1, y1 - 0.4 * (y1 - y0), x1, y1 - 8);
    } else if (x0 === x1) context.arc(x0, y0 - 12, 6, 0.75 * Math.PI, 2.25 * Math.PI);
    else {
      const side = x0 < x1 ? -1 : 1; // what comes later is below the line
      const height = Math.min(side < 0 ? up : down, 0.55 * Math.abs(x1 - x0) + 14) * (0.55 + 0.45 * (Math.abs(x1 - x0) / across));
      const y = y0 + side * (side < 0 ? 8 : view.sequence.room - 4);
      context.moveTo(x0, y);
      context.bezierCurveTo(x0, y + side * height * 1.25, x1, y + side * height * 1.25, x1, y);
    }
    context.stroke();
  };
  context.lineCap = "round";
  const edges = Array.from(visible()).sort((a, b) => values[a] - values[b]);
  context.globalAlpha = 0.3;
  for (const edge of edges) {
    const share = values[edge] / maximum;
    if (!isChosen(edge) && share > 0.04) draw(edge, theme.ramp(share), 0.4 + 2 * share);
  }
  context.globalAlpha = 1;
  const seen = new Map();
  for (const edge of edges.filter(isChosen)) {
    const share = values[edge] / maximum;
    draw(edge, theme.ramp(0.15 + 0.85 * share), 0.8 + 5.5 * share);
    seen.set(asSource === null ? graph.source[edge] : graph.target[edge], share);
  }
  for (const edge of [state.hover?.edge, state.cursor]) {
    if (edge !== undefined && edge !== null) draw(edge, theme.mark, 2.5);
  }
  const fill = nodeFill();
  for (const node of view.layout.nodes) {
    const [x, y] = tokenPlace(view, node);
    if (x < -60 || x > view.width + 60) continue;
    const share = seen.get(node);
    context.beginPath();
    trace(context, SHAPES[(space.classes ? space.classes[node] : 0) % SHAPES.length], x, y, 4.5);
    context.fillStyle = space.classes || nodeWeights() ? fill(node) : share === undefined ? theme.faint : theme.ramp(0.15 + 0.85 * share);
    context.fill();
    if (node === state.node || node === cursorNode()) {
      context.lineWidth = 2;
      context.strokeStyle = node === state.node ? theme.text : theme.mark;
      context.beginPath();
      context.arc(x, y, 8, 0, 2 * Math.PI);
      context.stroke();
    }
    const isAbove = !space.shared && node < space.sources;
    const bold = node === focus || node === asSource;
    const colour = bold || share > 0.1 ? theme.text : theme.soft;
    const words = shortened(plainName(space, node), 18);
    if (isTurned && step * view.transform.k < 9 && !bold && !(share > 0.3)) continue;
    const angle = isTurned ? -Math.PI / 3.6 : 0;
    const align = isTurned ? (isAbove ? "left" : "right") : "center";
    view.text(words, x + (isTurned ? 3 : 0), y + (isAbove ? -16 : 19), { align, angle, bold, colour, size: TOKEN_FONT, halo: bold });
  }
  if (!space.shared) {
    view.text("sources", 8, top + 18, { align: "left", colour: theme.soft, size: 11 });
    view.text("targets", 8, bottom - 18, { align: "left", colour: theme.soft, size: 11 });
  }
}
