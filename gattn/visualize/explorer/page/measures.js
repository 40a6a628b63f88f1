// What is computed from weights: entropy, rollout, and GAtt's attribution.

/** Entropy in nats of some weights, divided by their sum, and that of uniform weights. */
function entropy(weights, edges) {
  let total = 0;
  for (const edge of edges) total += weights[edge];
  let nats = 0;
  for (const edge of edges) {
    const share = total > 0 ? weights[edge] / total : 0;
    if (share > 0) nats -= share * Math.log(share);
  }
  return { nats, uniform: Math.log(Math.max(edges.length, 1)) };
}

/** One row of a rollout: the share of each node's input in the output of a node. */
function rolloutRow(through, node, residual) {
  let row = new Float64Array(through[0].graph.space.size);
  row[node] = 1;
  for (const layer of [...through].reverse()) {
    const next = new Float64Array(row.length);
    const { graph } = layer;
    const weights = layer.weights(-1);
    for (let i = 0; i < row.length; i++) {
      if (row[i] === 0) continue;
      const edges = graph.into(i);
      let total = 0;
      for (const edge of edges) total += weights[edge];
      if (total > 0) {
        next[i] += residual * row[i];
        for (const edge of edges) next[graph.source[edge]] += ((1 - residual) * row[i] * weights[edge]) / total;
      } else next[i] += row[i]; // a node without neighbours keeps its own input
    }
    row = next;
  }
  return row;
}

/** The edges of several layers as one graph, and where each layer's edges are in it. */
function union(through) {
  const [{ graph: first }] = through;
  if (through.every((layer) => layer.graph === first)) return { graph: first, places: through.map(() => null) };
  const { space } = first;
  const numbers = new Map();
  const source = [], target = [], words = [];
  const places = through.map(({ graph }) =>
    Uint32Array.from(graph.source, (_, edge) => {
      const key = graph.source[edge] * space.size + graph.target[edge];
      if (!numbers.has(key)) {
        numbers.set(key, source.length);
        source.push(graph.source[edge]);
        target.push(graph.target[edge]);
        words.push(graph.name(edge));
      }
      return numbers.get(key);
    }),
  );
  const names = words.some(Boolean) ? { words, index: words.map((_, edge) => edge) } : null;
  return { graph: new Graph(space, source, target, names), places };
}

/** GAtt: the products of weights along the paths of a node's computation tree, summed over each edge's occurrences. */
function attribution(through, node) {
  const { graph: all, places } = union(through);
  const values = new Float64Array(all.size);
  let reach = new Float64Array(all.space.size); // the products along the paths from the root to each node
  reach[node] = 1;
  for (let depth = through.length - 1; depth >= 0; depth--) {
    const { graph, weights } = through[depth];
    const alpha = weights(-1);
    const next = new Float64Array(reach.length);
    for (let i = 0; i < reach.length; i++) {
      if (reach[i] === 0) continue;
      for (const edge of graph.into(i)) {
        const product = reach[i] * alpha[edge];
        values[places[depth] ? places[depth][edge] : edge] += product;
        next[graph.source[edge]] += product;
      }
    }
    reach = next;
  }
  return { graph: all, values };
}
