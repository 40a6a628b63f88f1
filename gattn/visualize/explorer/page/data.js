// The numbers of the page: layers, graphs and sets of nodes, as Python wrote them.
const data = JSON.parse(document.getElementById("data").textContent);

function unpack(base64, type) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new { u2: Uint16Array, u4: Uint32Array, f4: Float32Array }[type](bytes.buffer);
}

/** Edges by target: those into node i are `edges[first[i]]` to `edges[first[i + 1] - 1]`. */
function byNode(ends, size) {
  const first = new Uint32Array(size + 1);
  for (const node of ends) first[node + 1]++;
  for (let node = 0; node < size; node++) first[node + 1] += first[node];
  const edges = new Uint32Array(ends.length);
  const next = first.slice();
  ends.forEach((node, edge) => (edges[next[node]++] = edge));
  return { first, edges };
}

class Graph {
  constructor(space, source, target, names = null) {
    Object.assign(this, { space, source, target, names, size: source.length });
    this.incoming = byNode(target, space.size);
  }

  /** The edges into a node. */
  into(node) {
    const { first, edges } = this.incoming;
    return edges.subarray(first[node], first[node + 1]);
  }

  /** What an edge is called, if anything. */
  name(edge) {
    return this.names ? this.names.words[this.names.index[edge]] : "";
  }
}

/** Whether a node is one of those targets that are no sources. */
const isTarget = (space, node) => !space.shared && node >= space.sources;

/** The names that several sources, or several targets, have. */
function repeatedNames(space) {
  const seen = new Set(), repeated = new Set();
  space.names?.forEach((name, node) => {
    const key = `${isTarget(space, node)} ${name}`;
    (seen.has(key) ? repeated : seen).add(key);
  });
  return repeated;
}

const spaces = data.spaces.map((stored) => ({
  ...stored,
  size: stored.shared ? stored.sources : stored.sources + stored.targets,
  firstTarget: stored.shared ? 0 : stored.sources,
  classes: stored.classes && unpack(stored.classes, "u2"),
  pos: stored.pos && unpack(stored.pos, "f4"),
  repeated: repeatedNames(stored),
}));

const graphs = data.graphs.map(
  (stored) =>
    new Graph(
      spaces[stored.space],
      unpack(stored.source.base64, stored.source.type),
      unpack(stored.target.base64, stored.target.type),
      stored.names && { words: stored.names.words, index: unpack(stored.names.index.base64, stored.names.index.type) },
    ),
);

const layers = data.layers.map((stored) => {
  const steps = unpack(stored.base64, "u2");
  const graph = graphs[stored.graph];
  const kept = new Map();
  /** The weights of a head, or of the mean of all heads (-1), one for each edge. */
  const weights = (head) => {
    if (!kept.has(head)) {
      const values = new Float32Array(graph.size);
      const heads = head < 0 ? [...Array(stored.heads).keys()] : [head];
      for (const number of heads) {
        const first = number * graph.size;
        for (let edge = 0; edge < graph.size; edge++) values[edge] += (steps[first + edge] * stored.step) / heads.length;
      }
      kept.set(head, values);
    }
    return kept.get(head);
  };
  return { name: stored.name, heads: stored.heads, graph, weights };
});

/** The name of a node; a number where it has no other. */
function plainName(space, node) {
  if (space.names) return space.names[node];
  return space.shared ? String(node) : node < space.sources ? `source ${node}` : `target ${node - space.sources}`;
}

/** The name of a node, with its number where others have the same name. */
function nodeName(space, node) {
  const name = plainName(space, node);
  if (!space.repeated.has(`${isTarget(space, node)} ${name}`)) return name;
  return `${name} · ${isTarget(space, node) ? node - space.sources : node}`;
}

const shortened = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
