// Puts the page together: header, folding, search, keys. Holds the one view state.

const at = (id) => document.getElementById(id);
const view = { data: null, folded: new Set(), withCalls: new Set(), found: new Set(), hits: [], hit: -1 };
const list = new RowList(at('tree'), at('rows'), renderRow, pickRow);

function renderRow(row) {
  if (row.summary) return summaryRow(row, view);
  return row.strand ? strandRow(row, view) : callRow(row, view);
}

function showAll() {
  Object.assign(view, { data: null, folded: new Set(), withCalls: new Set() });
  at('title').textContent = 'All executions';
  at('state').textContent = '';
  document.title = `${visible(run.log)}: all executions`;
  headRow(['execution', 'reward', 'calls', 'tokens', 'trained', 'leaves by role'], true);
  at('levels').replaceChildren();
  figures(merged(run.executions));
  at('panel').replaceChildren(make('p', 'soft', 'Choose an execution.'));
  clearSearch();
  paintStory();
  list.show(run.executions.map((summary, index) => ({ summary, index })));
  list.choose(0);
}

function merged(rows) {
  const sum = { reward: null, assessment: null, excluded_tokens: {}, roles: {} };
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  if (rewards.length) sum.reward = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  for (const key of ['calls', 'leaves', 'dead_tips', 'unique_tokens', 'expanded_tokens', 'sampled_tokens', 'trained_tokens', 'trajectories']) {
    sum[key] = rows.reduce((all, row) => all + row[key], 0);
  }
  for (const key of ['excluded_tokens', 'roles']) {
    for (const row of rows) for (const [name, n] of Object.entries(row[key])) sum[key][name] = (sum[key][name] || 0) + n;
  }
  return sum;
}

function showExecution(index) {
  const data = execution(index);
  const summary = run.executions[index];
  if (!data) {
    at('panel').replaceChildren(
      make('h2', 'id', visible(summary.id)),
      make('p', '', 'The page holds only this execution’s figures, to stay small enough to open. Make a page of its own with:'),
      make('pre', 'said', visible(`gyre tree inspect ${run.log} --execution '${summary.id}' --html page.html`)),
    );
    return;
  }
  Object.assign(view, { data, folded: new Set(), withCalls: new Set() });
  at('title').textContent = visible(summary.id);
  const told = [['group', summary.group], ['task', summary.task], ['', summary.harness], ['', summary.termination || summary.state]];
  at('state').textContent = told.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${visible(value)}`.trim()).join(' · ');
  document.title = `${visible(summary.id)}: trajectory tree`;
  headRow(['strand', 'calls', 'tokens', 'trained', 'in the order of calls →'], false);
  levels();
  figures(summary);
  clearSearch();
  refold();
  paintStory();
  at('panel').replaceChildren(make('p', 'soft', 'This execution made no calls.'));
  const start = list.rows.findIndex((row) => row.strand && row.strand.cause === 'start');
  if (list.rows.length) select(Math.max(0, start));
}

const LANES = { main: 0, 'main-summary': 1, 'sub-agent': 2, 'sub-agent-summary': 3, auxiliary: 4, lost: 4 };

function paintStory() {
  at('story').hidden = !view.data || !view.data.calls.length;
  if (!at('story').hidden) paintCalls(at('story'), view.data, view.data.calls.keys(), (role) => LANES[role], 5);
}

function headRow(names, several) {
  const cells = names.map((name, i) => make('span', i > 0 && i < names.length - 1 ? 'n' : '', name));
  at('columns').className = several ? 'row head several' : 'row head';
  at('columns').replaceChildren(...cells);
}

function figures(row) {
  const saved = row.expanded_tokens ? 1 - row.unique_tokens / row.expanded_tokens : 0;
  const tiles = [
    [rewardOf(row), view.data ? 'reward' : 'mean reward'], [count(row.calls), 'calls'],
    [count(row.leaves), row.dead_tips ? `leaves, ${count(row.dead_tips)} abandoned` : 'leaves'],
    [count(row.unique_tokens), 'unique tokens'], [percent(saved, 1), `saved of ${count(row.expanded_tokens)} on all paths`],
  ].map(([value, name]) => {
    const tile = make('div', 'tile');
    tile.append(make('b', '', value), make('span', '', name));
    return tile;
  });
  const excluded = Object.entries(row.excluded_tokens).sort((a, b) => b[1] - a[1]);
  const shades = { error: 'lost', aborted: 'lost', retried: 'lost', late: 'lost', rejected: 'lost', auxiliary: 'auxiliary' };
  const sampled = meter(
    `${count(row.sampled_tokens)} sampled tokens, ${percent(row.trained_tokens, row.sampled_tokens)} trained in ${count(row.trajectories)} trajectories`,
    [['trained', row.trained_tokens, 'trained'], ...excluded.map(([name, n]) => [name, n, shades[name] || 'soft'])],
  );
  const leaves = meter('leaves by role', Object.entries(row.roles).map(([role, n]) => [role, n, role]));
  at('figures').replaceChildren(...tiles, sampled, leaves);
}

function meter(title, parts) {
  const element = make('div', 'meter');
  const stack = make('div', 'stack');
  const keys = make('div');
  for (const [name, n, color] of parts) {
    const part = make('i');
    part.style.flexGrow = n;
    part.style.background = `var(--${color})`;
    stack.append(part);
    const key = make('span', 'key', `${name} ${count(n)}`);
    key.style.setProperty('--c', `var(--${color})`);
    if (run.fates[name]) key.title = run.fates[name];
    keys.append(key);
  }
  element.append(make('span', '', title), stack, keys);
  return element;
}

function levels() {
  const every = view.data.strands.map((strand) => strand.index);
  const choices = [['contexts', every, []], ['strands', [], []], ['calls', [], every]];
  at('levels').replaceChildren('show ', ...choices.map(([name, folded, withCalls]) => {
    const button = make('button', '', name);
    button.type = 'button';
    button.addEventListener('click', () => {
      view.folded = new Set(folded);
      view.withCalls = new Set(withCalls);
      refold();
      select(0);
    });
    return button;
  }), make('span', 'roles', '◆ drawn for training · pale: does not train'));
}

/** Rows anew after a change of folding, the chosen one kept where it is still there. */
function refold() {
  const chosen = list.rows[list.picked];
  list.show(treeRows(view.data, view.folded, view.withCalls));
  const same = (row) => chosen && row.strand === chosen.strand && row.call === chosen.call;
  list.choose(Math.max(0, list.rows.findIndex(same)));
}

function select(index) {
  const row = list.rows[index];
  if (!row) return;
  list.choose(index);
  if (row.strand) strandPanel(at('panel'), view, row.strand, openCall);
  if (row.call) callPanel(at('panel'), view, row.call, openCall);
  at('panel').scrollTop = 0;
}

function pickRow(index, twisted) {
  const row = list.rows[index];
  if (row.summary) showExecution(row.index);
  else if (twisted && row.strand) turn(row.strand);
  else select(index);
}

function turn(strand) {
  const set = strand.below.length ? view.folded : view.withCalls;
  if (!set.delete(strand.index)) set.add(strand.index);
  refold();
}

/** Unfold down to a call, choose it, show it. */
function openCall(call) {
  if (call.strand !== null) view.withCalls.add(call.strand);
  for (let at = call.strand; at !== null; at = view.data.strands[at].above) view.folded.delete(at);
  refold();
  select(list.rows.findIndex((row) => row.call === call));
}

function clearSearch() {
  Object.assign(view, { found: new Set(), hits: [], hit: -1 });
  at('find').value = '';
  at('hits').textContent = '';
}

function search() {
  const query = at('find').value.trim().toLowerCase();
  const matches = (row) => [row.id, row.task, row.group, ...Object.keys(row.roles)].join('\n').toLowerCase().includes(query);
  if (!query) view.hits = [];
  else if (view.data) view.hits = view.data.calls.concat(view.data.apart).filter((call) => wordsOf(view.data, call).includes(query));
  else view.hits = run.executions.filter(matches);
  view.found = new Set(view.hits);
  view.hit = -1;
  at('hits').textContent = query ? `${count(view.hits.length)} found` : '';
  list.draw(true);
}

function step(by) {
  if (!view.hits.length) return;
  view.hit = (view.hit + by + view.hits.length) % view.hits.length;
  const hit = view.hits[view.hit];
  at('hits').textContent = `${count(view.hit + 1)} of ${count(view.hits.length)}`;
  if (view.data) openCall(hit);
  else list.choose(run.executions.indexOf(hit));
}

function key(event) {
  const row = list.rows[list.picked];
  const page = Math.max(1, Math.floor(at('tree').clientHeight / ROW) - 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -list.rows.length, End: list.rows.length };
  if (event.key in moves) {
    const next = Math.min(list.rows.length - 1, Math.max(0, list.picked + moves[event.key]));
    if (view.data) select(next);
    else list.choose(next);
  } else if (event.key === 'ArrowRight' && row) unfold(row);
  else if (event.key === 'ArrowLeft' && row) fold(row);
  else if (event.key === 'Enter' && row) {
    if (row.summary) showExecution(row.index);
    else at('panel').focus();
  } else return;
  event.preventDefault();
}

function unfold(row) {
  if (row.summary) showExecution(row.index);
  if (!row.strand) return;
  if (!view.folded.delete(row.strand.index)) view.withCalls.add(row.strand.index);
  refold();
}

function fold(row) {
  const strand = row.strand;
  if (strand && view.withCalls.delete(strand.index)) refold();
  else if (strand && strand.below.length && !view.folded.has(strand.index)) {
    view.folded.add(strand.index);
    refold();
  } else {
    const above = strand ? strand.above : row.call && row.call.strand;
    const place = list.rows.findIndex((each) => each.strand && each.strand.index === above);
    if (place >= 0) select(place);
  }
}

function tip(event) {
  const token = event.target.token;
  at('tip').hidden = !token;
  if (!token) return;
  at('tip').textContent = tokenLines(token).join('\n');
  const box = event.target.getBoundingClientRect();
  at('tip').style.left = `${Math.min(box.left, window.innerWidth - 350)}px`;
  at('tip').style.top = box.bottom + 120 < window.innerHeight ? `${box.bottom + 6}px` : `${box.top - 110}px`;
}

at('log').textContent = visible(run.log);
at('all').hidden = run.executions.length < 2;
at('all').addEventListener('click', showAll);
at('story').addEventListener('click', (event) => {
  const place = event.offsetX / at('story').clientWidth;
  openCall(view.data.calls[Math.min(view.data.calls.length - 1, Math.floor(place * view.data.calls.length))]);
});
new ResizeObserver(paintStory).observe(at('story'));
at('tree').addEventListener('keydown', key);
at('find').addEventListener('input', search);
at('find').addEventListener('keydown', (event) => {
  if (event.key === 'Enter') step(event.shiftKey ? -1 : 1);
  if (event.key === 'Escape') { clearSearch(); list.draw(true); at('tree').focus(); }
});
at('before').addEventListener('click', () => step(-1));
at('after').addEventListener('click', () => step(1));
at('panel').addEventListener('pointerover', tip);
at('panel').addEventListener('pointerleave', () => { at('tip').hidden = true; });
document.addEventListener('keydown', (event) => {
  if (event.key === '/' && event.target !== at('find')) { event.preventDefault(); at('find').focus(); }
});
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { list.draw(true); paintStory(); });

if (run.executions.length === 1) showExecution(0);
else if (run.executions.length) showAll();
else at('title').textContent = 'The log holds no executions';
at('tree').focus();
