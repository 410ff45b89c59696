// A plan: what users wait for by rate of requests on one card, for each choice; the rate of all
// cards and the goals are the reader's.
for (const box of document.querySelectorAll("[data-plan]")) {
  const plan = JSON.parse(box.dataset.plan), body = box.querySelector("tbody");
  const input = (name) => box.querySelector(`input[name=${name}]`);
  const short = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`);
  const waits = [["tpot", "TPOT", 1], ["ttft", "TTFT", 2]];
  const goal = (name) => (+input(name).value > 0 ? +input(name).value : null);
  const excess = (point) => Math.max(...waits.map(([name, , at]) => (goal(name) ? point[at] / goal(name) : 0)));
  // The largest rate within the goals, on the line between two simulated ones
  const held = ({ points }) => {
    const beyond = points.findIndex((point) => excess(point) > 1);
    if (beyond < 1) return beyond ? points.at(-1)[0] : 0;
    const [low, high] = points.slice(beyond - 1, beyond + 1);
    return low[0] + (high[0] - low[0]) * (1 - excess(low)) / (excess(high) - excess(low));
  };
  const cards = (rate, most) => (most > 0 ? Math.ceil(rate / most - 1e-9) : null);
  const counted = (number) => `${number.toLocaleString("en")} ${number === 1 ? "card" : "cards"}`;
  const at = (points, rate, column) => {
    const after = points.findIndex((point) => point[0] >= rate);
    if (after < 1) return after ? null : points[0][column];
    const [low, high] = points.slice(after - 1, after + 1);
    return low[column] + (high[column] - low[column]) * (rate - low[0]) / (high[0] - low[0]);
  };
  const ticks = (most) => {
    const power = 10 ** Math.floor(Math.log10(most / 4)), step = [1, 2, 5, 10].find((each) => 5 * each * power >= most) * power;
    return [...Array(Math.floor(most / step) + 1).keys()].map((n) => n * step);
  };
  const answer = (rate, rows) => {
    const goals = waits.filter(([name]) => goal(name)).map(([name, title]) => `${title} <= ${short(goal(name))} ms`);
    if (!(rate > 0) || !goals.length) return "Give a rate and a goal.";
    const asked = `p${plan.percentile} ${goals.join(" and ")}`, open = rows.filter((row) => row.choice.open);
    const order = (one, two) => one.cards - two.cards || two.most - one.most;
    const [best] = open.filter((row) => row.cards).sort(order);
    if (!best) {
      const [closest] = open.sort((one, two) => excess(one.choice.points[0]) - excess(two.choice.points[0]));
      const above = 100 * (excess(closest.choice.points[0]) - 1);
      return `Nothing meets ${asked}, on any number of cards: ${closest.choice.name} comes closest, ${short(above)} % above it.`;
    }
    const plain = rows.find((row) => row.choice.plain), start = `At ${short(rate)} requests/s and ${asked}: ${best.choice.name} on ${counted(best.cards)}`;
    if (best === plain) return `${start}.`;
    const without = plain.cards === best.cards ? "as many" : plain.cards ? short(plain.cards) : "no number meets it";
    return `${start}; without a draft ${without}.`;
  };
  const panel = (name, title, column) => {
    const svg = box.querySelector(`svg[data-wait=${name}]`), limit = goal(name);
    svg.closest("figure").hidden = !limit;
    if (!limit) return;
    const { add, label, show } = marks(), most = Math.max(...plan.choices.map(({ points }) => points.at(-1)[0]));
    const highest = Math.max(...plan.choices.flatMap(({ points }) => points.map((point) => point[column])));
    const top = 1.05 * Math.max(limit, Math.min(highest, 3 * limit));
    const x = (value) => 40 + 290 * value / most, y = (value) => 150 - 138 * value / top;
    for (const value of ticks(top)) {
      add("line", { x1: 40, x2: 330, y1: y(value), y2: y(value), class: "rule" });
      label(36, y(value) + 3, short(value), { "text-anchor": "end" });
    }
    for (const value of ticks(most)) label(x(value), 162, short(value), { "text-anchor": "middle" });
    for (const choice of plan.choices) {
      const line = choice.points.map((point) => `${x(point[0]).toFixed(1)},${y(point[column]).toFixed(1)}`);
      add("polyline", { points: line.join(" "), class: "line", stroke: choice.colour, "stroke-dasharray": choice.open ? "" : "2 3" });
    }
    add("line", { x1: 40, x2: 330, y1: y(limit), y2: y(limit), class: "even" });
    for (const point of plan.measured) add("circle", { cx: x(point[0]), cy: y(point[column]), r: 3, stroke: point[3], class: "measured" });
    label(330, 174, "requests/s of one card", { "text-anchor": "end" });
    label(4, 8, `${title}, ms`);
    show(svg);
  };
  const draw = () => {
    const rate = +input("rate").value;
    const rows = plan.choices.map((choice) => {
      const most = held(choice);
      return { choice, most, cards: cards(rate, most) };
    });
    box.querySelector(".numbers").textContent = answer(rate, rows);
    for (const wait of waits) panel(...wait);
    body.replaceChildren(...rows.map(({ choice, most, cards: number }) => {
      const row = document.createElement("tr"), head = document.createElement("th"), key = document.createElement("span");
      key.textContent = choice.open ? "\u25a0 " : "\u25a1 ";
      key.style.color = choice.colour;
      head.scope = "row";
      head.append(key, choice.name);
      const share = number ? rate / number : null;
      const wait = (column) => (share ? at(choice.points, share, column) : null);
      const known = (value) => (value ? short(value) : "-");
      const cells = [most ? short(most) : "none", number ? short(number) : "none", known(wait(1)), known(wait(2)), choice.state];
      row.append(head, ...cells.map((text, column) => {
        const cell = document.createElement("td");
        cell.className = column < 4 ? "num" : "";
        cell.textContent = text;
        return cell;
      }));
      return row;
    }));
  };
  for (const each of box.querySelectorAll("input")) each.addEventListener("input", draw);
  box.hidden = false;
  draw();
}
