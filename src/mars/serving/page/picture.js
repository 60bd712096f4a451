// A picture of a race to share, drawn here in the colours of the page.

import { make } from "./dom.js";

const [WIDTH, HEIGHT, MARGIN] = [1200, 630, 72];
const INNER = WIDTH - 2 * MARGIN;
const BAR = 36;

/** Save a PNG of a race: { prompt, model, verdict, sides: [{ dial, rate, seconds, share }] }. */
export async function savePicture(race) {
  const canvas = make("canvas");
  Object.assign(canvas, { width: WIDTH, height: HEIGHT });
  draw(canvas.getContext("2d"), race);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  const link = Object.assign(make("a"), { href: URL.createObjectURL(blob), download: "mars-race.png" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function draw(pen, { prompt, model, verdict, sides }) {
  const [paper, ink, faint, accent, control, line] = colours("paper", "ink", "faint", "accent", "control", "line");
  const write = (text, x, y, font, colour, align = "left") => {
    Object.assign(pen, { font: `${font} system-ui, sans-serif`, fillStyle: colour, textAlign: align });
    pen.fillText(text, x, y, INNER);
  };
  pen.fillStyle = paper;
  pen.fillRect(0, 0, WIDTH, HEIGHT);
  write("MARS", MARGIN, 96, "700 34px", accent);
  write(model ?? "", WIDTH - MARGIN, 96, "400 24px", faint, "right");
  pen.font = "400 30px system-ui, sans-serif";
  wrapped(pen, `“${prompt}”`, 2).forEach((text, index) => write(text, MARGIN, 160 + 40 * index, "400 30px", ink));
  const [result, texts] = verdict.split(", ");
  write(result, MARGIN, 300, "700 60px", accent);
  write(texts, MARGIN, 346, "400 30px", ink);
  sides.forEach(({ dial, rate, seconds, share }, index) => {
    const top = 400 + 88 * index;
    const speed = Number.isFinite(rate) ? `${rate.toFixed(0)} tokens per second, ` : "";
    write(dial, MARGIN, top, "600 26px", ink);
    write(`${speed}${seconds.toFixed(2)} s`, WIDTH - MARGIN, top, "400 26px", ink, "right");
    pen.fillStyle = line;
    pen.fillRect(MARGIN, top + 12, INNER, BAR);
    pen.fillStyle = index ? accent : control;
    pen.fillRect(MARGIN, top + 12, INNER * share, BAR);
  });
  write("Bars: how far each had got when the first had finished. Run in turn, timed from the first token on.",
    MARGIN, HEIGHT - 32, "400 20px", faint);
}

/** The page's colours, as the canvas wants them */
function colours(...names) {
  const probe = document.body.appendChild(make("i"));
  const found = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
}

/** A text in at most so many lines, cut if it is longer. */
function wrapped(pen, text, most) {
  const lines = [""];
  for (const word of text.split(/\s+/)) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (pen.measureText(longer).width <= INNER) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.length > most ? [...lines.slice(0, most - 1), `${lines[most - 1]} …`] : lines;
}
