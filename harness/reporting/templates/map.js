// A map of speedups: tokens per round, and what a round costs, by K and alpha.
for (const box of document.querySelectorAll("[data-map]")) {
  const map = JSON.parse(box.dataset.map), svg = box.querySelector("svg");
  const slider = (name) => box.querySelector(`input[name=${name}]`);
  if (!map.draft) slider("scale").closest("p").hidden = true;
  const between = (row, alpha) => {
    const all = map.alphas, after = Math.max(1, all.findIndex((each) => each >= alpha - 1e-9));
    const share = (alpha - all[after - 1]) / (all[after] - all[after - 1]);
    return row[after - 1] + share * (row[after] - row[after - 1]);
  };
  const speedup = (n, alpha, scale) =>
    between(map.tokens[n], alpha) / (between(map.costs[n], alpha) + (map.draft ? map.draft[n] * (scale - 1) : 0));
  const best = (alpha, scale) => map.ks.reduce((found, k, n) => {
    const value = speedup(n, alpha, scale);
    return value > found.value ? { k, value } : found;
  }, { k: 0, value: 1 });
  const named = (found) => (found.k ? `K=${found.k}` : "no draft");
  const draw = () => {
    const alpha = +slider("alpha").value, scale = +slider("scale").value, now = best(alpha, scale);
    slider("alpha").parentElement.querySelector("output").value = alpha.toFixed(3);
    slider("scale").parentElement.querySelector("output").value = `${scale.toFixed(2)}x`;
    box.querySelector(".numbers").textContent = `${named(now)}: ${now.value.toFixed(2)}x`;
    const first = map.alphas[0], span = 1 - first, steps = 60, at = (n) => first + span * n / steps;
    const most = Math.max(1.2, ...map.ks.map((_, n) => speedup(n, 1, scale)));
    const x = (value) => 34 + 296 * (value - first) / span, y = (value) => 136 - 126 * value / most;
    const { add, label, show } = marks();
    for (const value of [0.5, 1, 2, 3, 4, 6].filter((each) => each <= most)) {
      add("line", { x1: 34, x2: 330, y1: y(value), y2: y(value), class: value === 1 ? "even" : "rule" });
      label(30, y(value) + 3, `${value}x`, { "text-anchor": "end" });
    }
    map.ks.forEach((k, n) => {
      const line = [...Array(steps + 1).keys()].map((m) => `${x(at(m)).toFixed(1)},${y(speedup(n, at(m), scale)).toFixed(1)}`);
      add("polyline", { points: line.join(" "), class: k === now.k ? "curve now" : "curve" });
    });
    let from = first, before = best(first, scale).k;
    for (let m = 1; m <= steps; m += 1) {
      const k = best(at(m), scale).k;
      if (k === before && m < steps) continue;
      const left = x(from), wide = x(at(m)) - left, text = before ? `K=${before}` : "no draft";
      add("rect", { x: left, y: 150, width: wide, height: 16, class: before ? "region" : "region none" });
      if (wide > 6 * text.length) label(left + wide / 2, 161, text, { "text-anchor": "middle" });
      [from, before] = [at(m), k];
    }
    for (const value of [first, 0.5, 1]) label(x(value), 180, value, { "text-anchor": "middle" });
    label(34, 194, "alpha; below the curves the best K");
    add("circle", { cx: x(alpha), cy: y(now.value), r: 4.5, class: "point" });
    show(svg);
  };
  for (const input of box.querySelectorAll("input")) input.addEventListener("input", draw);
  box.hidden = false;
  draw();
}
