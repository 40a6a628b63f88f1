// All heads at a glance: a small matrix for each, a row per layer.
const SMALL = 120; // pixels at most, each of which shows the largest weight that falls on it

function smallMatrix(layer, head) {
  const { graph } = layer;
  const { rows, columns } = matrixOrder(graph.space, Array(graph.space.size).keys());
  const [width, height] = [Math.min(columns.length, SMALL), Math.min(rows.length, SMALL)];
  const [xs, ys] = [new Map(), new Map()];
  columns.forEach((node, place) => xs.set(node, Math.floor((place * width) / columns.length)));
  rows.forEach((node, place) => ys.set(node, Math.floor((place * height) / rows.length)));
  const most = new Float32Array(width * height);
  const values = layer.weights(head);
  values.forEach((value, edge) => {
    const pixel = ys.get(graph.target[edge]) * width + xs.get(graph.source[edge]);
    most[pixel] = Math.max(most[pixel], value);
  });
  const canvas = element("canvas", { width, height, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const maximum = largestOf(values);
  const colours = theme.bins.map((colour) => d3.rgb(colour));
  most.forEach((value, pixel) => {
    if (value <= 0) return;
    const { r, g, b } = colours[binOf(value / maximum)];
    image.data.set([r, g, b, 255], 4 * pixel);
  });
  context.putImageData(image, 0, 0);
  const scale = SMALL / Math.max(rows.length, columns.length);
  canvas.style.width = `${Math.max(scale * columns.length, 8)}px`;
  canvas.style.height = `${Math.max(scale * rows.length, 8)}px`;
  return canvas;
}

function showOverview() {
  const most = Math.max(...layers.map((layer) => layer.heads));
  const table = element("table", {}, element("tr", {}, element("td"), ...Array.from({ length: most }, (_, head) => element("th", { scope: "col" }, `head ${head}`))));
  layers.forEach((layer, number) => {
    const cells = Array.from({ length: layer.heads }, (_, head) => {
      const isHere = number === state.layer && state.show === "weights" && (head === state.head || layer.heads === 1);
      const button = element("button", { type: "button", "aria-label": `${layer.name}, head ${head}`, "aria-pressed": String(isHere) }, smallMatrix(layer, head));
      button.addEventListener("click", () => {
        byId("overview").close();
        change({ show: "weights", layer: number, head });
        announce(`${layer.name}, head ${head}`);
      });
      return element("td", {}, button);
    });
    table.append(element("tr", {}, element("th", { scope: "row", title: layer.name }, ending(layer.name, 24)), ...cells));
  });
  byId("heads-overview").replaceChildren(table);
  byId("overview").showModal();
  (table.querySelector("[aria-pressed='true']") ?? table.querySelector("button")).focus();
}
