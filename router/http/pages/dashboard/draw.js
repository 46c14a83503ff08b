// Elements, numbers and small charts. All text goes through text nodes and attributes: nothing is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const at = (id) => document.getElementById(id);

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function number(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= size) return (value / (unit === "k" ? 1e3 : size)).toPrecision(3) + unit;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
}

export function bytes(value) {
  let unit = 0;
  for (; value >= 1024 && unit < 5; unit += 1) value /= 1024;
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(value >= 10 ? 1 : 2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(value >= 0.1 ? 0 : 1)} ms`;
  return `${Math.round(value * 1e6)} µs`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

// A line of the latest values from zero upwards; gaps are values that are not known.
export function sparkline(points, width, height, kind = "") {
  const values = points.length < 30 ? [...Array(30 - points.length).fill(NaN), ...points] : points;
  const known = values.filter(Number.isFinite);
  const top = Math.max(...known, 1e-9) * 1.08;
  const step = width / Math.max(values.length - 1, 1);
  let line = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) { pen = "M"; return; }
    line += `${pen}${(i * step).toFixed(1)},${(height - 1 - (value / top) * (height - 2)).toFixed(1)}`;
    pen = "L";
  });
  const box = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: `spark ${kind}`, "aria-hidden": "true" };
  return svg("svg", box, svg("path", { d: line || "M0,0", "vector-effect": "non-scaling-stroke" }));
}

// A horizontal bar of parts [name, value, text]; `whole` is what fills it.
export function stacked(parts, whole) {
  const bar = h("div", { class: "bar" });
  for (const [name, value, text] of parts) {
    if (!(value > 0)) continue;
    const part = h("i", { class: `c-${name}`, title: text });
    part.style.width = `${(100 * value) / whole}%`;
    bar.append(part);
  }
  return bar;
}

export function legend(parts) {
  return h("ul", { class: "legend" }, parts.map(([name, label, text]) =>
    h("li", {}, h("i", { class: `c-${name}` }), h("span", {}, label), h("b", {}, text))));
}

export function table(heads, rows, kind = "") {
  return h("table", { class: kind },
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows));
}

// Buttons of which one is pressed.
export function tabs(box, names, chosen, choose) {
  const buttons = names.map(([name, label]) =>
    h("button", { type: "button", "aria-pressed": String(name === chosen), onclick: () => {
      for (const [i, button] of buttons.entries()) button.setAttribute("aria-pressed", String(names[i][0] === name));
      choose(name);
    } }, label));
  box.replaceChildren(...buttons);
}
