// Changes one part of a page into another without replacing what is equal, so that focus, selection,
// scrolled boxes and open details stay where the reader left them.

/** Makes `shown` equal to `fresh`, an element of another document. */
export function morph(shown, fresh) {
  copyAttributes(shown, fresh);
  copyChildren(shown, fresh);
}

// Rows and list items are known by their first link, so that one that moved is still itself.
function keyOf(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return null;
  if (node.id) return `#${node.id}`;
  if (node.tagName !== "TR" && node.tagName !== "LI") return null;
  return node.querySelector("a[href]")?.getAttribute("href") ?? null;
}

function copyAttributes(shown, fresh) {
  for (const { name } of [...shown.attributes]) {
    const isReaders = name === "open" && shown.tagName === "DETAILS";
    if (!fresh.hasAttribute(name) && !isReaders) shown.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  }
}

function copyChildren(shown, fresh) {
  const wanted = [...fresh.childNodes];
  const freshKeys = new Set(wanted.map(keyOf));
  const known = new Map();
  for (const child of [...shown.childNodes]) {
    const key = keyOf(child);
    if (key === null) continue;
    if (freshKeys.has(key) && !known.has(key)) known.set(key, child);
    else child.remove();
  }
  let place = shown.firstChild;
  for (const node of wanted) {
    const key = keyOf(node);
    const match = key === null ? unkeyed(place, node) : known.get(key);
    known.delete(key);
    if (!match) {
      shown.insertBefore(document.importNode(node, true), place);
      continue;
    }
    if (match === place) place = place.nextSibling;
    else shown.insertBefore(match, place);
    if (match.nodeType === Node.ELEMENT_NODE) morph(match, node);
    else if (match.data !== node.data) match.data = node.data;
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function unkeyed(shown, fresh) {
  return shown && shown.nodeName === fresh.nodeName && keyOf(shown) === null ? shown : null;
}
