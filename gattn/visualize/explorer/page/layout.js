// Where nodes are: as given, or by D3's forces, which are computed in slices.
const SLICE = 12; // milliseconds at a time, so that the page stays responsive
const SHOWN_EVERY = 300; // milliseconds between pictures of a layout that is not settled

/** Starts each component of a graph in a place of its own, and its nodes beside their neighbours, so that they do not get entangled. */
function spread(bodies, links) {
  const near = bodies.map(() => []);
  for (const { source, target } of links) {
    near[source].push(target);
    near[target].push(source);
  }
  const seen = new Set();
  const components = [];
  for (const first of bodies.keys()) {
    if (seen.has(first)) continue;
    seen.add(first);
    const component = [first];
    for (const body of component) {
      for (const other of near[body]) {
        if (seen.has(other)) continue;
        seen.add(other);
        component.push(other);
      }
    }
    components.push(component);
  }
  const around = (place, distance) => [distance * Math.cos(2.4 * place), distance * Math.sin(2.4 * place)];
  let before = 0;
  for (const [number, component] of components.sort((a, b) => b.length - a.length).entries()) {
    const [left, top] = around(number, number && 36 * Math.sqrt(before + component.length));
    before += component.length;
    component.forEach((body, place) => {
      const [x, y] = around(place, 12 * Math.sqrt(place + 0.5));
      Object.assign(bodies[body], { x: left + x, y: top + y });
    });
  }
}

class Layout {
  constructor(onMove, isUpright) {
    Object.assign(this, { onMove, isUpright });
    this.x = this.y = new Float32Array(0);
    this.nodes = new Uint32Array(0);
    this.isSettled = true;
  }

  /** Places these nodes of a graph; others have no position. */
  place(graph, nodes) {
    const { space } = graph;
    const isNewSpace = this.space !== space;
    const before = { x: this.x, y: this.y };
    Object.assign(this, { space, nodes, simulation: null, isSettled: true });
    if (isNewSpace || !before.x.length) this.x = new Float32Array(space.size).fill(NaN);
    if (isNewSpace || !before.y.length) this.y = new Float32Array(space.size).fill(NaN);
    if (space.pos) {
      for (const node of nodes) {
        this.x[node] = space.pos[2 * node];
        this.y[node] = -space.pos[2 * node + 1];
      }
    } else if (!space.sequence) this.start(graph);
    this.tree = null;
  }

  start(graph) {
    const bodies = Array.from(this.nodes, (node) => ({ node }));
    const places = new Map(bodies.map((body, place) => [body.node, place]));
    for (const body of bodies) {
      if (Number.isFinite(this.x[body.node])) Object.assign(body, { x: this.x[body.node], y: this.y[body.node] });
    }
    const pairs = new Set();
    const links = [];
    for (let edge = 0; edge < graph.size; edge++) {
      const a = places.get(graph.source[edge]), b = places.get(graph.target[edge]);
      const key = a < b ? a * bodies.length + b : b * bodies.length + a;
      if (a === undefined || b === undefined || a === b || pairs.has(key)) continue;
      pairs.add(key);
      links.push({ source: a, target: b });
    }
    if (bodies.every(({ x }) => x === undefined)) spread(bodies, links);
    const isSmall = bodies.length <= 300;
    this.simulation = d3
      .forceSimulation(bodies)
      .force("link", d3.forceLink(links).distance(isSmall ? 46 : 26))
      .force("charge", d3.forceManyBody().strength(isSmall ? -260 : -38).distanceMax(isSmall ? 600 : 320).theta(isSmall ? 0.9 : 1.1))
      .force("x", d3.forceX().strength(isSmall ? 0.05 : 0.06))
      .force("y", d3.forceY().strength(isSmall ? 0.065 : 0.06))
      .alphaDecay(isSmall ? 0.02 : 0.04)
      .alphaMin(isSmall ? 0.001 : 0.004)
      .stop();
    if (isSmall) this.simulation.force("link").strength(0.9);
    this.isSettled = false;
    this.advance(performance.now() + (isSmall ? 500 : 150)); // small graphs are settled when they are first seen
    if (this.isSettled) this.turn();
    if (!this.isSettled) this.schedule(this.simulation);
  }

  /** Turns the layout so that its longer side is upright or level, as the picture's is. */
  turn() {
    let [xx, xy, yy] = [0, 0, 0];
    for (const { x, y } of this.simulation.nodes()) {
      xx += x * x;
      xy += x * y;
      yy += y * y;
    }
    const axis = 0.5 * Math.atan2(2 * xy, xx - yy);
    const angle = (this.isUpright() ? Math.PI / 2 : 0) - axis;
    const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
    for (const { node, x, y } of this.simulation.nodes()) {
      this.x[node] = cos * x - sin * y;
      this.y[node] = sin * x + cos * y;
    }
  }

  schedule(simulation) {
    setTimeout(() => {
      if (this.simulation !== simulation) return; // another one has begun
      const now = performance.now();
      this.advance(now + SLICE);
      if (this.isSettled || now - (this.shown ?? 0) > SHOWN_EVERY) {
        this.shown = now;
        this.onMove();
      }
      if (!this.isSettled) this.schedule(simulation);
    }, 3); // in between, the page answers clicks and keys
  }

  advance(deadline) {
    const { simulation } = this;
    do simulation.tick();
    while (simulation.alpha() > simulation.alphaMin() && performance.now() < deadline);
    for (const { node, x, y } of simulation.nodes()) {
      this.x[node] = x;
      this.y[node] = y;
    }
    this.tree = null;
    this.isSettled = simulation.alpha() <= simulation.alphaMin();
  }

  /** The node nearest to a position, if it is within a distance. */
  nearest(x, y, distance) {
    this.tree ??= d3.quadtree(Array.from(this.nodes), (node) => this.x[node], (node) => this.y[node]);
    return this.tree.find(x, y, distance) ?? null;
  }

  /** `[left, top, right, bottom]` of all nodes. */
  bounds() {
    let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
    for (const node of this.nodes) {
      left = Math.min(left, this.x[node]);
      right = Math.max(right, this.x[node]);
      top = Math.min(top, this.y[node]);
      bottom = Math.max(bottom, this.y[node]);
    }
    return [left, top, right, bottom];
  }
}
