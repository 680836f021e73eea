// The right side: everything the log says of one strand or one call.

const GIVEN_SHOWN = 200;
const SAMPLED_SHOWN = 3000;
const MORE = 10000;
const CALLS_SHOWN = 200;

function facts(pairs) {
  const list = make('dl');
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === '') continue;
    const shown = make('dd');
    shown.append(value instanceof Node ? value : visible(value));
    list.append(make('dt', '', name), shown);
  }
  return list;
}

function link(call, open) {
  const button = make('button', 'link', visible(call.id));
  button.type = 'button';
  button.addEventListener('click', () => open(call));
  return button;
}

function links(calls, open) {
  const shown = make('span');
  calls.slice(0, 20).forEach((call) => shown.append(link(call, open), ' '));
  if (calls.length > 20) shown.append(`… ${count(calls.length - 20)} more`);
  return calls.length ? shown : null;
}

const plainObject = (value) => Object.entries(value).map(([key, item]) => `${key} ${typeof item === 'object' ? JSON.stringify(item) : item}`).join(', ');

function strandPanel(panel, view, strand, open) {
  const { data } = view;
  const head = data.calls[strand.calls[0]];
  const title = make('h2', 'id', visible(head.id));
  const chips = make('div', 'chips');
  chips.append(chip(strand.role, strand.role), make('span', 'soft', `strand of ${count(strand.calls.length)} calls`));
  if (strand.abandoned) chips.append(chip(strand.abandoned, 'lost', true));
  const source = strand.source === null ? null : link(data.calls[strand.source], open);
  panel.replaceChildren(
    title, chips,
    facts([
      ['begins', `${strand.cause}: ${run.causes[strand.cause]}`], ['caused by', source],
      ['drawn', strand.drawn ? `as trajectory ${strand.drawn}` : 'no: no trajectory ends here'],
      ['tokens', `${count(strand.totals.given)} given, ${count(strand.totals.sampled)} sampled, ${count(strand.totals.trained)} trained`],
    ]),
    ...roleDecision(strand), make('h3', '', 'Calls'),
  );
  const list = make('div');
  panel.append(list);
  const add = (from) => {
    strand.calls.slice(from, from + CALLS_SHOWN).forEach((at) => {
      const call = data.calls[at];
      const line = make('div', 'soft');
      line.append(link(call, open), ` +${count(call.sizes.given)} given, ${count(call.sizes.sampled)} sampled, ${call.finish}`);
      list.append(line);
    });
    moreButton(panel, strand.calls.length - from - CALLS_SHOWN, 'calls', () => add(from + CALLS_SHOWN));
  };
  add(0);
}

function roleDecision(strand) {
  const why = make('ul', 'why');
  strand.evidence.forEach((reason) => why.append(make('li', '', visible(reason))));
  return [make('h3', '', `Why ${strand.role}: confidence ${strand.confidence.toFixed(2)}`), why];
}

function moreButton(place, left, what, act) {
  if (left <= 0) return;
  const button = make('button', 'more', `… ${count(left)} more ${what}`);
  button.type = 'button';
  button.addEventListener('click', () => { button.remove(); act(); });
  place.append(button);
}

function callPanel(panel, view, call, open) {
  const strand = call.strand === null ? null : view.data.strands[call.strand];
  const chips = make('div', 'chips');
  if (strand) chips.append(chip(strand.role, strand.role));
  chips.append(chip(call.finish, call.finish === 'stop' ? 'trained' : 'lost', true));
  for (const fate of new Set(call.fates.map(([name]) => name))) chips.append(make('span', 'soft', fate));
  panel.replaceChildren(make('h2', 'id', visible(call.id)), chips, callFacts(view, call, open));
  if (call.why) panel.append(make('h3', '', 'In no tree'), make('p', '', visible(call.why)));
  if (strand && lastOf(strand) === call.index) panel.append(...roleDecision(strand));
  for (const [heading, text] of [['Asked', call.asked], ['Prompt after what it extends', call.prompt], ['Answered', call.answer]]) {
    if (text) panel.append(make('h3', '', heading), make('pre', 'said', visible(text)));
  }
  tokenView(panel, call);
}

function callFacts(view, call, open) {
  const { start, first, end } = call.time;
  const spent = Number.isFinite(start) && Number.isFinite(end) ? end - start : null;
  const parent = call.parent === null ? null : link(view.data.calls[call.parent], open);
  return facts([
    ['tokens', `${count(call.sizes.given)} given, ${count(call.sizes.sampled)} sampled, ${count(call.sizes.trained)} trained; `
      + `positions ${count(call.start)} to ${count(call.start + call.sizes.tokens)}`],
    ['left out', call.fates.filter(([fate]) => fate !== 'trained').map(([fate, n]) => `${count(n)} ${fate} (${run.fates[fate]})`).join('; ')],
    ['extends', parent], ['extended by', call.index === null ? null : links(call.children, open)], ['repeats', call.attempt_of],
    ['versions', call.versions.map(([version, from, to]) => `${version} for output ${from} to ${to}`).join(', ')],
    ['time', spent === null ? null : `${seconds(spent)}, ${Number.isFinite(first) ? `first token after ${seconds(first - start)}, ` : ''}`
      + `${(call.sizes.sampled / Math.max(spent, 1e-9)).toFixed(1)} tokens/s, at ${new Date(start * 1000).toISOString()}`],
    ['engine', call.engine], ['sampling', plainObject(call.sampling)], ['hints', plainObject(call.hints)], ['digest', call.digest],
  ]);
}

function tokenView(panel, call) {
  const { given, sampled } = tokensOf(call);
  const legend = make('p', 'legend', 'colour: ');
  for (const [name, text] of [['given', 'given'], ['trained', 'trained'], ['left', 'sampled, left out'], ['s2', ''], ['s4', ''], ['s6', 'less probable →']]) {
    legend.append(make('span', `t ${name}`, text || ' '));
  }
  panel.append(make('h3', '', `Tokens: ${count(given.length)} given, then ${count(sampled.length)} sampled`), legend);
  const box = make('div', run.pieces ? 'tokens' : 'tokens ids');
  const before = make('div');
  panel.append(before, box);
  let first = Math.max(0, given.length - GIVEN_SHOWN);
  const earlier = () => {
    moreButton(before, first, 'given tokens before', () => {
      const to = first;
      first = Math.max(0, first - MORE);
      box.prepend(...given.slice(first, to).map(tokenElement));
      earlier();
    });
  };
  earlier();
  box.append(...given.slice(first).map(tokenElement));
  const later = (from, size) => {
    box.append(...sampled.slice(from, from + size).map(tokenElement));
    moreButton(panel, sampled.length - from - size, 'sampled tokens', () => later(from + size, MORE));
  };
  later(0, SAMPLED_SHOWN);
}

function tokenElement(token) {
  const piece = token.piece === undefined ? String(token.id) : visible(token.piece).replace(/\n/g, '⏎\n') || '∅';
  const kind = token.fate === 'given' || token.fate === 'trained' ? token.fate : 'left';
  const level = token.logprob === undefined || Number.isNaN(token.logprob) ? 0 : Math.min(6, Math.floor(-token.logprob / .5));
  const element = make('span', `t ${kind}${level > 0 ? ` s${level}` : ''}`, piece);
  element.token = token;
  return element;
}

/** What is known of one token, a line each. */
function tokenLines(token) {
  const lines = [`token ${token.id}${token.piece === undefined ? '' : `  “${visible(token.piece)}”`}`, `position ${token.at}`];
  if (token.logprob !== undefined) {
    lines.push(Number.isNaN(token.logprob) ? 'no log-prob' : `log-prob ${token.logprob.toPrecision(6)}  (p ${Math.exp(token.logprob).toPrecision(3)})`);
  }
  if (token.version !== undefined) lines.push(`weight version ${token.version}`);
  lines.push(token.fate === 'given' ? 'given to the model' : `${token.fate}: ${run.fates[token.fate]}`);
  return lines;
}
