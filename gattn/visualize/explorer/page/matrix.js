// The same weights as a matrix: rows are targets, columns are sources.

/** The rows and columns of some nodes: by class, then by number. */
function matrixOrder(space, nodes) {
  const sorted = Array.from(nodes);
  if (space.classes && !space.sequence) sorted.sort((a, b) => space.classes[a] - space.classes[b] || a - b);
  return {
    rows: space.shared ? sorted : sorted.filter((node) => isTarget(space, node)),
    columns: space.shared ? sorted : sorted.filter((node) => !isTarget(space, node)),
  };
}

class MatrixView extends View {
  /** Puts the nodes that are shown in order. */
  order(space, nodes) {
    Object.assign(this, { space, ...matrixOrder(space, nodes) });
    this.rowOf = new Map(this.rows.map((node, row) => [node, row]));
    this.columnOf = new Map(this.columns.map((node, column) => [node, column]));
  }

  fit() {
    const most = Math.max(this.rows.length, this.columns.length);
    const { context } = this;
    context.font = `11px ${theme.font}`;
    const label = (nodes) => Math.max(...nodes.slice(0, 80).map((node) => context.measureText(shortened(plainName(this.space, node), 14)).width));
    const hasNames = most <= 60;
    this.hasNames = hasNames;
    const upright = hasNames ? label(this.columns) : 0;
    this.names = hasNames ? upright * 0.87 + 12 : 0; // the height of the columns' names
    this.left = (hasNames ? label(this.rows) + 8 : 0) + 26;
    this.top = this.names + 26;
    const [wide, high] = [this.width - this.left - 10 - upright / 2, this.height - this.top - 10];
    this.cell = Math.min(wide / this.columns.length, high / this.rows.length, 46);
    this.top += Math.max((high - this.cell * this.rows.length) / 3 - 12, 0);
  }

  x(column) {
    return this.left + this.transform.x + this.transform.k * this.cell * column;
  }

  y(row) {
    return this.top + this.transform.y + this.transform.k * this.cell * row;
  }

  /** The cell at a position: a row and a column, and the edge if there is one. */
  cellAt(x, y) {
    if (!this.rows || x < this.left || y < this.top) return null;
    const column = Math.floor((x - this.x(0)) / (this.cell * this.transform.k));
    const row = Math.floor((y - this.y(0)) / (this.cell * this.transform.k));
    if (row < 0 || column < 0 || row >= this.rows.length || column >= this.columns.length) return null;
    return { row, column };
  }

  edgeIn({ row, column }) {
    const { graph } = shownField();
    const source = this.columns[column];
    return graph.into(this.rows[row]).find((edge) => graph.source[edge] === source);
  }

  hit(x, y) {
    const cell = this.cellAt(x, y);
    if (!cell) return null;
    const reach = this.cell * this.transform.k < 3 ? Math.ceil(3 / (this.cell * this.transform.k)) : 0;
    let edge = this.edgeIn(cell);
    for (let near = 1; near <= reach && edge === undefined; near++) {
      for (const [dy, dx] of [[0, near], [0, -near], [near, 0], [-near, 0]]) {
        const other = { row: cell.row + dy, column: cell.column + dx };
        if (edge === undefined && this.rows[other.row] !== undefined && this.columns[other.column] !== undefined) edge = this.edgeIn(other);
      }
    }
    return edge === undefined ? { cell } : { edge, cell };
  }

  click(x, y) {
    const found = this.hit(x, y);
    if (!found) return;
    select(found.edge === undefined ? this.rows[found.cell.row] : shownField().graph.target[found.edge]);
  }

  /** Moves the cursor by rows and columns, to be read out. */
  step(rows, columns) {
    const from = this.cursor ?? { row: this.rowOf.get(state.node) ?? 0, column: -columns };
    const within = (place, count) => Math.min(Math.max(place, 0), count - 1);
    this.cursor = { row: within(from.row + rows, this.rows.length), column: within(from.column + columns, this.columns.length) };
    const edge = this.edgeIn(this.cursor);
    const names = [this.rows[this.cursor.row], this.columns[this.cursor.column]].map((node) => nodeName(this.space, node));
    announce(`${names[0]} from ${names[1]}: ${edge === undefined ? "no edge" : number(shownField().values[edge])}`);
    state.hover = edge === undefined ? null : { edge };
    invalidateViews();
  }

  draw(context) {
    if (!this.rows?.length || !this.columns.length) return;
    this.fit();
    const { graph, values, maximum } = shownField();
    const size = this.cell * this.transform.k;
    const bins = Array.from({ length: BINS }, () => []);
    for (const edge of visible()) {
      if (values[edge] > 0) bins[binOf(values[edge] / maximum)].push(edge);
    }
    const [right, bottom] = [this.x(this.columns.length), this.y(this.rows.length)];
    context.save();
    context.beginPath();
    context.rect(this.left - 1, this.top - 1, this.width, this.height);
    context.clip();
    context.fillStyle = theme.raised;
    context.fillRect(this.x(0), this.y(0), right - this.x(0), bottom - this.y(0));
    const row = this.rowOf.get(state.node), column = this.columnOf.get(state.node);
    // A band behind cells would be taken for their colour: it is for those that are too small for an outline.
    context.fillStyle = theme.line;
    if (row !== undefined && size <= 3) context.fillRect(this.x(0), this.y(row + 0.5) - 1, right - this.x(0), 2);
    if (column !== undefined && size <= 3) context.fillRect(this.x(column + 0.5) - 1, this.y(0), 2, bottom - this.y(0));
    const least = this.rows.length > 500 ? 1.8 : 1;
    const mark = Math.max(size - (size > 6 ? 1 : 0), least);
    bins.forEach((members, bin) => {
      context.fillStyle = theme.bins[bin];
      for (const edge of members) {
        const x = this.x((this.columnOf.get(graph.source[edge]) ?? -9) + 0.5), y = this.y((this.rowOf.get(graph.target[edge]) ?? -9) + 0.5);
        if (x < this.left - size || y < this.top - size || x > this.width + size || y > this.height + size) continue;
        context.fillRect(x - mark / 2, y - mark / 2, mark, mark);
      }
    });
    context.lineWidth = 1.5;
    if (row !== undefined && size > 3) {
      context.strokeStyle = theme.text;
      context.strokeRect(this.x(0), this.y(row), right - this.x(0), size);
    }
    const pointed = this.cursor ?? state.hover?.cell;
    const hovered = state.hover?.edge ?? state.cursor;
    context.strokeStyle = theme.mark;
    context.lineWidth = 2;
    const outline = (r, c) => context.strokeRect(this.x(c + 0.5) - Math.max(size, 6) / 2, this.y(r + 0.5) - Math.max(size, 6) / 2, Math.max(size, 6), Math.max(size, 6));
    if (pointed && document.activeElement === this.canvas) outline(pointed.row, pointed.column);
    else if (hovered !== undefined && hovered !== null) {
      const shown = shownField().graph;
      const place = [this.rowOf.get(shown.target[hovered]), this.columnOf.get(shown.source[hovered])];
      if (!place.includes(undefined)) outline(...place);
    }
    context.restore();
    this.drawNames(context, size);
  }

  drawNames(context, size) {
    const { classes } = this.space;
    const strip = classes && !this.space.sequence ? 5 : 0;
    const spaced = Math.max(1, Math.ceil(10.5 / size)); // every so many rows have a name
    const apart = Math.max(1, Math.ceil(13 / size));
    const here = this.rowOf.get(state.node);
    this.rows.forEach((node, row) => {
      const y = this.y(row + 0.5);
      if (y < this.top || y > this.height) return;
      if (strip) {
        context.fillStyle = classColour(classes[node]);
        context.fillRect(this.left - strip - 2, y - Math.max(size, 1) / 2, strip, Math.max(size, 1));
      }
      const isHere = row === here;
      if (!this.hasNames || (!isHere && (row % spaced || Math.abs(row - here) < spaced))) return;
      const colour = isHere ? theme.text : theme.soft;
      this.text(shortened(plainName(this.space, node), 14), this.left - strip - 6, y, { align: "right", size: 11, bold: isHere, colour });
    });
    this.columns.forEach((node, column) => {
      const x = this.x(column + 0.5);
      if (x < this.left || x > this.width) return;
      if (strip) {
        context.fillStyle = classColour(classes[node]);
        context.fillRect(x - Math.max(size, 1) / 2, this.top - strip - 2, Math.max(size, 1), strip);
      }
      if (!this.hasNames || column % apart) return;
      const words = shortened(plainName(this.space, node), 14);
      this.text(words, x, this.top - strip - 6, { align: "left", angle: -Math.PI / 3, size: 11, colour: theme.soft, halo: false });
    });
    this.text("sources →", this.left + 2, this.top - this.names - 15, { align: "left", size: 11, colour: theme.soft, halo: false });
    this.text("← targets", 10, this.top + 2, { align: "right", angle: -Math.PI / 2, size: 11, colour: theme.soft, halo: false });
  }
}
