// Marks of a drawing, collected and then shown at once.
const marks = () => {
  const parts = [];
  const safe = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
  const add = (name, values, text = "") => {
    const written = Object.entries(values).map(([key, value]) => `${key}="${safe(value)}"`).join(" ");
    parts.push(`<${name} ${written}>${safe(text)}</${name}>`);
  };
  const label = (left, top, text, more = {}) => add("text", { x: left, y: top, ...more }, text);
  return { add, label, show: (svg) => { svg.innerHTML = parts.join(""); } };
};
