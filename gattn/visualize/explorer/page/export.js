// What leaves the page as a file: a view as SVG, or as PNG.
const SHARPNESS = 3; // pixels of a PNG for each one on the screen

/** As much of a canvas's context as the views draw with, written as SVG. */
class VectorContext {
  constructor(width, height) {
    Object.assign(this, { isSharp: true, globalAlpha: 1, lineWidth: 1, fillStyle: "#000000", strokeStyle: "#000000", lineCap: "butt", lineJoin: "miter", textAlign: "left", font: "", path: "", turns: "", clipping: "" });
    this.saved = [];
    this.ruler = document.createElement("canvas").getContext("2d");
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) this.svg.setAttribute(key, value);
  }

  add(name, attributes, parent = this.svg) {
    const made = document.createElementNS(this.svg.namespaceURI, name);
    const all = { ...attributes, transform: this.turns, "clip-path": this.clipping, opacity: this.globalAlpha === 1 ? "" : this.globalAlpha };
    for (const [key, value] of Object.entries(all)) if (value !== "") made.setAttribute(key, typeof value === "number" ? +value.toFixed(2) : value);
    parent.append(made);
    return made;
  }

  line(letter, ...places) {
    this.path += letter + places.map((place) => +place.toFixed(2)).join(" ");
  }

  beginPath() { this.path = ""; }
  closePath() { this.path += "Z"; }
  moveTo(...place) { this.line("M", ...place); }
  lineTo(...place) { this.line("L", ...place); }
  quadraticCurveTo(...places) { this.line("Q", ...places); }
  bezierCurveTo(...places) { this.line("C", ...places); }

  rect(x, y, width, height) {
    this.line("M", x, y);
    this.path += `h${+width.toFixed(2)}v${+height.toFixed(2)}h${+(-width).toFixed(2)}Z`;
  }

  arc(x, y, r, from, to) {
    const at = (angle) => [x + r * Math.cos(angle), y + r * Math.sin(angle)];
    this.line("M", ...at(from));
    for (const angle of [(from + to) / 2, to]) this.line("A", r, r, 0, 0, 1, ...at(angle)); // a circle takes two
  }

  get ink() { return { fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-linecap": this.lineCap, "stroke-linejoin": this.lineJoin }; }
  fill() { this.add("path", { d: this.path, fill: this.fillStyle }); }
  stroke() { this.add("path", { d: this.path, ...this.ink }); }
  fillRect(x, y, width, height) { this.add("rect", { x, y, width, height, fill: this.fillStyle }); }
  strokeRect(x, y, width, height) { this.add("rect", { x, y, width, height, ...this.ink }); }
  fillText(words, x, y) { this.write(words, x, y, { fill: this.fillStyle }); }
  strokeText(words, x, y) { this.write(words, x, y, this.ink); }

  write(words, x, y, ink) {
    const [, weight, size, family] = /^(\d+ )?([\d.]+)px (.*)$/.exec(this.font);
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    this.add("text", { x, y, dy: "0.35em", "font-size": Number(size), "font-family": family, "font-weight": (weight ?? "").trim(), "text-anchor": anchor, ...ink }).textContent = words;
  }

  measureText(words) {
    this.ruler.font = this.font;
    return this.ruler.measureText(words);
  }

  clip() {
    const id = `clip-${this.svg.childElementCount}`;
    this.add("path", { d: this.path }, this.add("clipPath", { id }));
    this.clipping = `url(#${id})`;
  }

  translate(x, y) { this.turns += `translate(${+x.toFixed(2)} ${+y.toFixed(2)})`; }
  rotate(angle) { this.turns += angle ? `rotate(${+((180 * angle) / Math.PI).toFixed(2)})` : ""; }

  save() {
    const { globalAlpha, lineWidth, fillStyle, strokeStyle, lineCap, lineJoin, textAlign, font, turns, clipping } = this;
    this.saved.push({ globalAlpha, lineWidth, fillStyle, strokeStyle, lineCap, lineJoin, textAlign, font, turns, clipping });
  }

  restore() { Object.assign(this, this.saved.pop()); }
}

/** What is written below a view, and where: what it shows, and the classes. */
function captionOf({ context, width, height }) {
  context.font = `12px ${theme.font}`;
  const items = [];
  let x = 12, y = height + 16;
  for (const { name, number } of [{ name: shownInWords() }, ...shownClasses()]) {
    const length = (number === undefined ? 0 : 12) + context.measureText(name).width;
    if (items.length && x + length > width - 8) [x, y] = [12, y + 20];
    items.push({ name, number, x, y });
    x += length + 16;
  }
  return { items, bottom: y + 16 };
}

/** Draws a view and its caption, without what the pointer is on. */
function drawPicture(view, context, { items, bottom }) {
  const { context: usual } = view;
  const { hover: pointed } = state;
  Object.assign(view, { context });
  state.hover = null;
  context.fillStyle = theme.ground;
  context.fillRect(0, 0, view.width, bottom);
  view.draw(context);
  for (const { name, number, x, y } of items) {
    if (number !== undefined) drawShape(context, SHAPES[number % SHAPES.length], x + 4, y, 4.8, classColour(number), theme.ground);
    view.text(name, number === undefined ? x : x + 12, y, { align: "left", halo: false });
  }
  Object.assign(view, { context: usual });
  state.hover = pointed;
}

/** Saves a view as a file, which takes no network. */
async function savePicture(name, type) {
  const view = views[name];
  const caption = captionOf(view);
  let blob;
  if (type === "svg") {
    const context = new VectorContext(view.width, caption.bottom);
    drawPicture(view, context, caption);
    blob = new Blob([new XMLSerializer().serializeToString(context.svg)], { type: "image/svg+xml" });
  } else {
    const canvas = element("canvas", { width: SHARPNESS * view.width, height: SHARPNESS * caption.bottom });
    const context = canvas.getContext("2d");
    context.scale(SHARPNESS, SHARPNESS);
    context.isSharp = true; // nodes are traced, not copied
    drawPicture(view, context, caption);
    blob = await new Promise((done) => canvas.toBlob(done));
  }
  const words = [data.title, layers[state.layer].name, state.show === "weights" ? headName(state.head) : state.show, name].join(" ");
  const link = element("a", { href: URL.createObjectURL(blob), download: `${words.replace(/[^\p{L}\p{N}.]+/gu, "-").slice(-100)}.${type}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  announce(`Saved ${link.download}`);
}
