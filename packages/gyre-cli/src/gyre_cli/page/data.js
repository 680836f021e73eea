'use strict';
// What the log says: blocks of the page, decoded when they are looked at. Nothing here touches what is shown.

const run = JSON.parse(document.getElementById('run').textContent);

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Text with control and direction characters made visible, so that it reads as it is. */
function visible(text) {
  return String(text).replace(HIDDEN, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
}

/** Array of base64 little-endian numbers, `kind` one of the typed arrays of four bytes. */
function unpacked(kind, text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new kind(bytes.buffer);
}

const loaded = new Map();

/** Execution number `index` of the page; null when only its figures are here. */
function execution(index) {
  if (!loaded.has(index)) {
    const block = document.getElementById(`execution-${index}`);
    loaded.set(index, block ? prepared(JSON.parse(block.textContent), run.executions[index]) : null);
  }
  return loaded.get(index);
}

function prepared(data, summary) {
  data.summary = summary;
  data.calls.forEach((call, index) => Object.assign(call, { index, sizes: sizes(call) }));
  data.apart.forEach((call) => Object.assign(call, { index: null, sizes: sizes(call) }));
  data.strands.forEach((strand, index) => {
    Object.assign(strand, { index, below: [], totals: total(strand.calls.map((at) => data.calls[at].sizes)) });
    if (strand.above !== null) data.strands[strand.above].below.push(strand);  // what is above comes before
  });
  for (const call of data.calls) {
    call.children = [];
    if (call.parent !== null) data.calls[call.parent].children.push(call);
  }
  return data;
}

function sizes(call) {
  const sampled = call.fates.reduce((sum, [, count]) => sum + count, 0);
  const trained = call.fates.reduce((sum, [fate, count]) => sum + (fate === 'trained' ? count : 0), 0);
  const given = packedLength(call.given);
  return { given, sampled, trained, tokens: given + sampled };
}

function packedLength(text) {
  const padding = text.endsWith('==') ? 2 : text.endsWith('=') ? 1 : 0;
  return (text.length * 3 / 4 - padding) / 4;
}

function total(all) {
  const sum = { given: 0, sampled: 0, trained: 0, tokens: 0 };
  for (const each of all) for (const key in sum) sum[key] += each[key];
  return sum;
}

/** A call's tokens: [{id, at, piece, fate, logprob, version}], at = position on the path. */
function tokensOf(call) {
  const given = Array.from(unpacked(Int32Array, call.given), (id, i) => ({ id, at: call.start + i, fate: 'given' }));
  const logprobs = unpacked(Float32Array, call.logprobs);
  const from = call.start + given.length;
  const sampled = Array.from(unpacked(Int32Array, call.sampled), (id, i) => ({ id, at: from + i, logprob: logprobs[i] }));
  let next = 0;
  for (const [fate, count] of call.fates) for (let i = 0; i < count; i++) sampled[next++].fate = fate;
  for (const [version, start, end] of call.versions) for (let i = start; i < end; i++) sampled[i].version = version;
  for (const token of given.concat(sampled)) token.piece = run.pieces ? run.pieces[token.id] : undefined;
  return { given, sampled };
}

/** Role that a call serves: its strand's at the leaf, before it that of the agent whose work it is. */
function roleOf(data, call) {
  const strand = data.strands[call.strand];
  if (strand.abandoned && lastOf(strand) === call.index) return 'lost';
  return lastOf(strand) === call.index ? strand.role : strand.role.replace(/-summary$/, '');
}

const lastOf = (strand) => strand.calls[strand.calls.length - 1];

/** The words by which a search finds a call. */
function wordsOf(data, call) {
  if (call.words === undefined) {
    const strand = call.strand === null ? null : data.strands[call.strand];
    const own = [call.id, call.finish, call.asked, call.prompt, call.answer, call.why, call.fates.map(([fate]) => fate).join(' ')];
    // A strand's role is its leaf's, its cause its head's.
    if (strand && lastOf(strand) === call.index) own.push(strand.role);
    if (strand && strand.calls[0] === call.index) own.push(strand.cause);
    call.words = own.join('\n').toLowerCase();
  }
  return call.words;
}

const count = (number) => number.toLocaleString('en');
const percent = (part, whole) => (whole ? `${Math.round(100 * part / whole)} %` : '–');
const rewardOf = (row) => (row.reward === null ? row.assessment || '–' : row.reward.toFixed(3));

function seconds(value) {
  return value < 90 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
