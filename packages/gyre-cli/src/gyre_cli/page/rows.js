// The left side: which rows there are under the present folding, and only those in view as elements.

const ROW = 27;
const MOST_RAILS = 5;  // deeper levels are numbered, so that a row keeps its text

/** An element; text is always inserted as text. */
function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

const excerpt = (text) => visible(text.slice(0, 160).replace(/\s+/g, ' '));

function chip(text, color, hollow) {
  const element = make('span', hollow ? 'chip hollow' : 'chip', text);
  element.style.setProperty('--c', `var(--${color})`);
  return element;
}

/** Rows of one execution: {strand | call, depth}, from the top. */
function treeRows(data, folded, withCalls) {
  const rows = [];
  const stack = data.strands.filter((strand) => strand.above === null).map((strand) => ({ strand, depth: 0 })).reverse();
  while (stack.length) {
    const row = stack.pop();
    rows.push(row);
    if (row.strand && !folded.has(row.strand.index)) stack.push(...under(data, row, withCalls).reverse());
  }
  data.apart.forEach((call) => rows.push({ call, depth: 0 }));
  return rows;
}

/** What stands right under a strand: its calls if wanted, each followed by the strands that hang on it. */
function under(data, { strand, depth }, withCalls) {
  const below = strand.below.map((each) => ({ strand: each, depth: depth + 1 }));
  if (!withCalls.has(strand.index)) return below;
  const rows = [];
  const place = new Map(strand.calls.map((at, order) => [at, order]));
  const earlier = (head) => strand.calls.findLastIndex((at) => at < head);
  const hangsOn = (row) => place.get(row.strand.source) ?? earlier(row.strand.calls[0]);
  const waiting = below.sort((a, b) => hangsOn(a) - hangsOn(b));
  strand.calls.forEach((at, order) => {
    rows.push({ call: data.calls[at], depth: depth + 1 });
    while (waiting.length && hangsOn(waiting[0]) === order) rows.push(waiting.shift());
  });
  return rows;
}

function strandRow(row, view) {
  const { strand, depth } = row;
  const { data } = view;
  const element = shell(depth, true, strand.below.length ? !view.folded.has(strand.index) : view.withCalls.has(strand.index));
  const name = element.firstChild;
  name.append(strand.abandoned ? chip(strand.abandoned, 'lost', true) : chip(strand.role, strand.role));
  if (strand.drawn) name.append(make('span', 'soft', `◆${strand.drawn}`));
  const head = data.calls[strand.calls[0]];
  const cause = strand.cause === strand.abandoned ? '' : strand.cause;
  name.append(make('span', 'soft', cause), make('span', 'id', visible(head.id)), make('span', 'what soft', excerpt(head.asked)));
  element.append(
    make('span', 'n', count(strand.calls.length)), make('span', 'n', count(strand.totals.tokens)),
    make('span', 'n', percent(strand.totals.trained, strand.totals.sampled)), lane(view, strand, strand.calls),
  );
  if (strand.calls.some((at) => view.found.has(data.calls[at]))) element.classList.add('hit');
  return element;
}

function callRow(row, view) {
  const { call, depth } = row;
  const element = shell(depth, false, false);
  element.classList.add('call');
  const name = element.firstChild;
  const dot = make('span', 'dot');
  dot.style.setProperty('--c', `var(--${call.sizes.trained ? 'trained' : call.index === null ? 'lost' : 'auxiliary'})`);
  name.append(dot, make('span', 'id', visible(call.id)));
  if (call.why) name.append(chip(call.fates.length ? call.fates[0][0] : 'apart', 'lost', true));
  if (call.finish !== 'stop') name.append(chip(call.finish, call.finish === 'length' ? 'auxiliary' : 'lost', true));
  name.append(make('span', 'what soft', excerpt(call.answer)));
  element.append(
    make('span', 'n'), make('span', 'n', count(call.sizes.tokens)),
    make('span', 'n', percent(call.sizes.trained, call.sizes.sampled)),
    call.index === null ? make('span') : lane(view, view.data.strands[call.strand], [call.index]),
  );
  if (view.found.has(call)) element.classList.add('hit');
  return element;
}

function shell(depth, folds, open) {
  const element = make('div', 'row');
  element.setAttribute('role', 'treeitem');
  element.setAttribute('aria-level', depth + 1);
  const name = make('span', 'name');
  for (let i = 0; i < Math.min(depth, MOST_RAILS); i++) name.append(make('span', 'rail'));
  if (depth > MOST_RAILS) name.append(make('span', 'soft', `↳${depth}`));
  const twist = make('span', 'twist', folds ? (open ? '▾' : '▸') : '');
  if (folds) element.setAttribute('aria-expanded', open);
  name.append(twist);
  element.append(name);
  return element;
}

/** Where calls lie in the execution's order: full colour where they train, pale where not. */
function lane(view, strand, calls) {
  const canvas = make('canvas', 'lane');
  canvas.paint = () => paintCalls(canvas, view.data, calls, () => 0, 1, [strand.calls[0], lastOf(strand)]);
  return canvas;
}

/** Calls as bars from left to right in the order of the log, in `lanes` lanes of which `laneOf` gives one by role. */
function paintCalls(canvas, data, calls, laneOf, lanes, span) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const brush = canvas.getContext('2d');
  brush.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const step = width / data.calls.length;
  const wide = Math.max(1.5, step);
  const tall = height / lanes;
  if (span) {
    brush.fillStyle = style.getPropertyValue('--line');
    brush.fillRect(step * span[0], height / 2 - .5, step * (span[1] - span[0]) + wide, 1);
  }
  const bars = new Map();  // calls that fall on the same pixels are one bar, so that pale stays pale
  for (const at of calls) {
    const role = roleOf(data, data.calls[at]);
    const x = step < 1.5 ? Math.floor(step * at / 1.5) * 1.5 : step * at;
    const bar = { x, role, trains: data.calls[at].sizes.trained > 0 };
    const place = `${x} ${laneOf(role)}`;
    if (!bars.has(place) || bar.trains) bars.set(place, bar);
  }
  for (const { x, role, trains } of bars.values()) {
    brush.fillStyle = style.getPropertyValue(`--${role}`);
    brush.globalAlpha = trains ? 1 : .36;
    brush.fillRect(x, tall * laneOf(role) + tall * .12, wide, tall * .76);
  }
}

function summaryRow({ summary }, view) {
  const element = make('div', 'row several');
  const name = make('span', 'name');
  name.append(make('span', 'what id', visible(summary.id)));
  if (!summary.embedded) name.append(make('span', 'soft', 'figures only'));
  if (summary.task !== null) name.append(make('span', 'what soft', visible(summary.task)));
  const roles = make('span', 'what');
  for (const [role, leaves] of Object.entries(summary.roles)) {
    const key = make('span', 'key', `${count(leaves)} ${role}`);
    key.style.setProperty('--c', `var(--${role})`);
    roles.append(key);
  }
  element.append(
    name, make('span', 'n', rewardOf(summary)), make('span', 'n', count(summary.calls)),
    make('span', 'n', count(summary.unique_tokens)), make('span', 'n', percent(summary.trained_tokens, summary.sampled_tokens)), roles,
  );
  if (view.found.has(summary)) element.classList.add('hit');
  return element;
}

/** Keeps elements for the rows in view only. `render(row)` makes one. */
class RowList {
  constructor(scroller, holder, render, pick) {
    Object.assign(this, { scroller, holder, render, pick, rows: [], picked: -1 });
    scroller.addEventListener('scroll', () => this.draw());
    new ResizeObserver(() => this.draw(true)).observe(scroller);
    holder.addEventListener('click', (event) => {
      const row = event.target.closest('.row');
      if (row) pick(Number(row.dataset.at), event.target.closest('.twist') !== null);
    });
  }

  show(rows) {
    this.rows = rows;
    this.holder.style.height = `${rows.length * ROW}px`;
    this.draw(true);
  }

  draw(anew) {
    const from = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - 8);
    const to = Math.min(this.rows.length, Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / ROW) + 8);
    if (!anew && from === this.from && to === this.to) return;
    Object.assign(this, { from, to });
    const elements = [];
    for (let at = from; at < to; at++) {
      const element = this.render(this.rows[at]);
      element.id = `row-${at}`;
      element.dataset.at = at;
      element.style.top = `${at * ROW}px`;
      element.setAttribute('aria-selected', at === this.picked);
      element.classList.toggle('picked', at === this.picked);
      elements.push(element);
    }
    this.holder.replaceChildren(...elements);
    for (const canvas of this.holder.querySelectorAll('canvas')) canvas.paint();
  }

  choose(at) {
    this.picked = at;
    const top = at * ROW;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top;
    if (top + ROW > scrollTop + clientHeight) this.scroller.scrollTop = top + ROW - clientHeight;
    this.scroller.setAttribute('aria-activedescendant', `row-${at}`);
    this.draw(true);
  }
}
