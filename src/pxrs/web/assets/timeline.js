// The picture of ownership over time: a lane for each partition, a bar for each owner, a mark for each event.
import { count, h, moment } from "./dom.js";

const LEFT = 130, WIDTH = 1000, ROW = 22, TOP = 22, NAMES_MAX = 24;
const LEVELS = { "partition.taken_over": "bad", "partition.fenced": "bad", "partition.refused": "bad", "partition.lost": "bad", "partition.paused": "bad", "message.dead_lettered": "bad", "partition.handed_over": "good", "partition.claimed": "good", "partition.retried": "warn", "partition.skipped": "warn", "message.skipped": "warn" };
const SHAPES = { bad: "M0 -6 L6 5 L-6 5 Z", good: "M0 -5 A5 5 0 1 1 -0.01 -5 Z", warn: "M0 -6 L6 0 L0 6 L-6 0 Z", plain: "M-3.5 -3.5 H3.5 V3.5 H-3.5 Z" };

export function picture(found, colour) {
  const { rows: shown, marks, since, now, partitions } = found.timeline;
  if (!shown.length) return h("p", { class: "quiet" }, "No partition had an owner in this period.");
  const height = TOP + shown.length * ROW + 6, at = new Map(shown.map((row, number) => [`${row.topic}/${row.partition}`, number]));
  const x = (time) => LEFT + (Math.max(0, Math.min(1, (time - since) / (now - since))) * (WIDTH - LEFT - 8));
  const names = new Map(shown.flatMap((row) => row.bars.map((bar) => [bar.incarnation, bar.member])));
  const lanes = shown.map((row, number) => {
    const y = TOP + number * ROW;
    const bars = row.bars.map((bar) => h("rect", { class: `owned ${colour(bar.incarnation)}`, x: x(bar.from).toFixed(1), y: y + 3, width: Math.max(1.5, x(bar.to) - x(bar.from)).toFixed(1), height: ROW - 7, rx: 2, "data-epoch": bar.epoch, "data-member": bar.member }, h("title", null, `${row.topic}/${row.partition}: ${bar.member}, epoch ${bar.epoch}, from ${moment(bar.from)} to ${moment(bar.to)}`)));
    const label = `${row.topic}/${row.partition}`;
    return h("g", null, h("text", { x: LEFT - 8, y: y + 15, "text-anchor": "end" }, label.length > 20 ? `…${label.slice(-19)}` : label), h("rect", { class: "lane", x: LEFT, y: y + 3, width: WIDTH - LEFT - 8, height: ROW - 7, rx: 2 }), bars);
  });
  const points = marks.filter((mark) => at.has(`${mark.topic}/${mark.partition}`) && mark.name !== "partition.released").map((mark) => {
    const level = LEVELS[mark.name] || "plain", y = TOP + at.get(`${mark.topic}/${mark.partition}`) * ROW + 10.5;
    return h("g", { transform: `translate(${x(mark.at).toFixed(1)} ${y})`, "data-event": mark.name, "data-epoch": mark.epoch ?? "" }, h("path", { class: `mark ${level}`, d: SHAPES[level] }, h("title", null, `${moment(mark.at)} ${mark.name}: ${mark.text}`)));
  });
  const ticks = [0, 1, 2, 3, 4, 5, 6].map((part) => {
    const time = since + ((now - since) * part) / 6, anchor = part === 0 ? "start" : part === 6 ? "end" : "middle";
    return h("g", null, h("line", { class: "tick", x1: x(time), x2: x(time), y1: TOP - 4, y2: height }), h("text", { x: x(time), y: 12, "text-anchor": anchor }, moment(time).slice(11, 19)));
  });
  return [
    h("p", { class: "legend" }, [...names].slice(0, NAMES_MAX).map(([incarnation, name]) => h("span", { "data-key": incarnation }, h("span", { class: `swatch ${colour(incarnation)}` }), name || incarnation)), h("span", null, "● claimed or handed over"), h("span", null, "▲ taken over, fenced, refused, paused"), h("span", null, "◆ retried, skipped")),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline of ownership" }, h("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `Owners of ${count(shown.length)} partitions; the table of events below lists the same changes` }, ticks, lanes, points)),
    partitions > shown.length ? h("p", { class: "quiet" }, `Showing the ${count(shown.length)} of ${count(partitions)} partitions that changed last.`) : null,
  ];
}
