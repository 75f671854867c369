"""What every page must hold, as scripts that name what is wrong."""

# Every text against what lies behind it, as WCAG counts (4.5, or 3 for large text).
CONTRAST = """(() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = c => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
  const lum = c => { const f = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; return .2126 * f(c[0]) + .7152 * f(c[1]) + .0722 * f(c[2]); };
  const bad = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || ['SCRIPT', 'STYLE', 'TITLE'].includes(e.tagName) || !e.offsetParent) continue;
    if (e.closest('.visually-hidden, .skip, :disabled')) continue;
    let back = [255, 255, 255, 1];
    for (let b = e; b; b = b.parentElement) { const c = rgb(getComputedStyle(b).backgroundColor); if (c[3] > .99) { back = c; break; } }
    const s = getComputedStyle(e), front = rgb(s.color), a = lum(front), b = lum(back);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05), large = parseFloat(s.fontSize) >= 24 || (parseFloat(s.fontSize) >= 18.6 && s.fontWeight >= 600);
    if (ratio < (large ? 3 : 4.5)) bad.push([walk.currentNode.textContent.trim().slice(0, 30), ratio.toFixed(2)]);
  }
  return bad;
})()"""

# Everything that can be operated has a name; ids are used once; images and fields are labelled.
LABELS = """(() => {
  const bad = [], seen = new Set();
  for (const e of document.querySelectorAll('[id]')) { if (seen.has(e.id)) bad.push('id twice: ' + e.id); seen.add(e.id); }
  for (const e of document.querySelectorAll('button, input, textarea, select, canvas, [role=img], details > summary')) {
    const label = e.id && document.querySelector(`label[for="${e.id}"]`), name = e.getAttribute('aria-label') || e.textContent.trim() || (label && label.textContent.trim()) || (e.closest('label') && e.closest('label').textContent.trim());
    if (!name) bad.push('no name: ' + e.outerHTML.slice(0, 80));
  }
  for (const a of ['aria-controls', 'aria-describedby', 'aria-labelledby']) for (const e of document.querySelectorAll(`[${a}]`)) if (!document.getElementById(e.getAttribute(a))) bad.push(a + ' leads nowhere');
  if (!document.documentElement.lang) bad.push('no language');
  if (document.querySelectorAll('h1').length !== 1) bad.push('h1');
  return bad;
})()"""


def say(browser, text):
    turns = browser.js("document.querySelectorAll('.turn.assistant').length")
    browser.js("document.querySelector('#input').focus()")
    browser.type(text)
    browser.key("Enter", text="\r")
    browser.until(f"document.querySelectorAll('.turn.assistant').length === {turns + 1} && "
                  "document.querySelector('#stop').classList.contains('hidden') && "
                  "[...document.querySelectorAll('.turn.assistant .meta')].at(-1).textContent.includes('tokens')", 60)
    return browser.js("[...document.querySelectorAll('.turn.assistant .body')].at(-1).textContent")
