// The page: one image to the engine, and what it says drawn here. Nothing is fetched from elsewhere,
// and no markup is built from text: names of classes and files come from outside.

import { explain, model, predict, prepare, RequestError, WORDS } from "./engine.js";

const DIM = "8, 12, 20";

const at = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const plain = (name) => name.replaceAll("_", " ");
const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const arrow = (numbers) => numbers.join(" → ");
const quick = (ms) => `${ms < 100 ? ms.toFixed(1) : Math.round(ms)} ms`;

let turn = null; // the image that is being classified; a newer one stops it
let drawn = null; // the explanation on the page, for when the window changes its width

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

const UNITS = [["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];
const unitOf = (macs) => UNITS.find(([, size]) => macs >= size) ?? UNITS.at(-1);
const digits = (value) => (value >= 999.5 ? String(Math.round(value)) : value.toPrecision(3));

function amount(macs) {
  const [unit, size] = unitOf(macs);
  return `${digits(macs / size)} ${unit}`.trim();
}

// ── an image and its way to the engine ────────────────────────────────────────────────────────

async function look(blob, name) {
  stopCamera();
  turn?.abort();
  turn = new AbortController();
  const { signal } = turn;
  say("Classifying …");
  clear();
  try {
    const bitmap = await decoded(blob);
    if (signal.aborted) return;
    showImage(bitmap, name);
    const sent = await prepare(blob, bitmap);
    const start = performance.now();
    const predicted = await predict(sent, signal);
    if (signal.aborted) return; // while the body was read, which is then empty
    showAnswer(predicted, performance.now() - start);
    const explanation = await explain(sent, signal);
    if (signal.aborted) return;
    drawn = { explanation, bitmap, name };
    showSeen();
    showStages();
    showCosts();
  } catch (error) {
    if (!signal.aborted) showProblem(error);
  }
}

// The image upright, or null where this browser cannot show it; the engine may still read it.
async function decoded(blob) {
  try {
    return await createImageBitmap(blob, { imageOrientation: "from-image" });
  } catch {
    return null;
  }
}

// ── the answer ─────────────────────────────────────────────────────────────────────────────────

function say(text, said = false) {
  at("status").textContent = text;
  at("status").classList.toggle("said", said);
}

function clear() {
  drawn = null;
  for (const id of ["intro", "problem", "times", "view", "stages", "costs"]) at(id).hidden = true;
  at("top").replaceChildren();
}

function showProblem(error) {
  const expected = error instanceof RequestError;
  const words = (expected && WORDS[error.status]) || "Something went wrong.";
  const detail = error.message ? ` (${error.message})` : "";
  at("problem").textContent = words + (expected && error.status in { 503: 1, 504: 1 } ? "" : detail);
  at("problem").hidden = false;
  scrollToAnswer();
  if (!at("top").children.length) say("No prediction.");
}

function showImage(bitmap, name) {
  const canvas = at("image");
  at("drop").classList.toggle("full", bitmap !== null);
  canvas.hidden = bitmap === null;
  at("invite").hidden = bitmap !== null;
  at("invite").textContent = "This browser cannot show that file.";
  if (!bitmap) return;
  const scale = Math.min(1, 1024 / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.setAttribute("aria-label", `Your image: ${name}`);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
}

// On a phone the answer is below the image, out of sight.
function scrollToAnswer() {
  const { top } = at("answer").getBoundingClientRect();
  if (top < innerHeight / 2) return;
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  at("answer").scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
}

function showAnswer({ predictions: [{ top }], milliseconds }, trip) {
  say(`${plain(top[0].name)}, ${percent(top[0].probability)}`, true);
  scrollToAnswer();
  at("top").replaceChildren(
    ...top.map(({ name, probability }) => {
      const fill = element("i");
      requestAnimationFrame(() => (fill.style.width = `${100 * probability}%`));
      return element(
        "li", {},
        element("span", { class: "name" }, plain(name)),
        element("span", {}, percent(probability)),
        element("span", { class: "bar", "aria-hidden": "true" }, fill),
      );
    }),
  );
  at("server-ms").textContent = quick(milliseconds);
  at("trip-ms").textContent = quick(trip);
  at("times").hidden = false;
}

// The part that the model sees, framed where it is not the whole image.
function showSeen() {
  const { explanation: { seen, image }, bitmap } = drawn;
  const whole = seen.width > 0.999 && seen.height > 0.999;
  const part = whole ? "the whole image" : "the framed part of the image";
  at("view").textContent = `The model sees ${part} in ${image[1]} × ${image[0]} pixels.`;
  at("view").hidden = false;
  if (whole || !bitmap) return;
  const canvas = at("image");
  const context = canvas.getContext("2d");
  const box = [seen.left * canvas.width, seen.top * canvas.height, seen.width * canvas.width, seen.height * canvas.height];
  context.fillStyle = `rgba(${DIM}, .5)`;
  context.beginPath();
  context.rect(0, 0, canvas.width, canvas.height);
  context.rect(...box);
  context.fill("evenodd");
  context.lineWidth = Math.max(2, canvas.width / 200);
  context.strokeStyle = "#fff";
  context.strokeRect(...box);
}

// ── the hierarchy ──────────────────────────────────────────────────────────────────────────────

const HINT = "Point at a token, or use the arrow keys, to see which patches it came from.";

const HOW = {
  max:
    "Each stage keeps fewer tokens, with the largest value of each channel. The brighter a patch, the more of it " +
    "is kept; nothing is kept of a hatched one.",
  avg: "Each stage averages neighbouring tokens; a token is drawn in the average colour of its patches.",
  merge: "Each block averages its most similar tokens; a token is drawn in the average colour of its patches.",
  drop:
    "Each block drops the tokens that receive the least attention. Bright patches are kept, hatched ones are " +
    "dropped.",
};
// Of a model that keeps all its patches up to the last block.
const ALONE =
  "All tokens go through all blocks. After the last block's attention only the class token is left: it has " +
  "attended to every patch, and the prediction is read from it.";
const mixes = () => ["avg", "merge"].includes(drawn.explanation.reduction);

function showStages() {
  const { explanation } = drawn;
  const { stages, blocks, patches, untraced, class_token: extra } = explanation;
  const last = stages.at(-1);
  const alone = extra && stages.length === 2 && last.tokens === 1 && last.after_block === blocks.length - 1;
  const numbers = stages.map((stage) => stage.tokens);
  const shown = numbers.length > 7 ? [...numbers.slice(0, 3), "…", numbers.at(-1)] : numbers;
  at("stages-title").textContent = `${arrow(shown)} tokens`;
  const also = extra ? ", after a class token" : "";
  const patch = `The image becomes ${patches[0]} × ${patches[1]} patches, a token for each${also}.`;
  if (untraced) at("stages-note").textContent = `${patch} Which patches survive cannot be shown: ${untraced}.`;
  else if (stages.length === 1) at("stages-note").textContent = `${patch} This model keeps them all.`;
  else at("stages-note").textContent = `${patch} ${alone ? ALONE : HOW[explanation.reduction]}`;
  at("detail").hidden = stages[0].kept === null;
  at("detail").textContent = HINT;
  const figures = alone ? stages.slice(0, 1) : stages; // nothing was dropped that an image could show
  at("strip").replaceChildren(...figures.map((stage, index) => stageFigure(stage, index)));
  at("stages").hidden = false;
}

function stageFigure(stage, index) {
  const { explanation: { image, patches } } = drawn;
  const canvas = element("canvas");
  const side = 448;
  canvas.width = side;
  canvas.height = Math.round((side * image[0]) / image[1]);
  const when = index ? `after block ${stage.after_block}` : "at first";
  const left = stage.shares?.filter((share) => share > 0).length;
  const total = patches[0] * patches[1];
  const caption = element(
    "figcaption", {},
    element("b", {}, count(stage.tokens, "token")),
    element("span", {}, when + laid(stage.grid)),
    element("span", {}, left === undefined ? "" : `from ${left} of ${total} patches`),
  );
  drawStage(canvas, stage, null);
  if (stage.kept === null || !stage.kept.length) {
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${count(stage.tokens, "token")} ${when}`);
  } else explore(canvas, stage, when);
  return element("figure", {}, canvas, caption);
}

function laid(grid) {
  if (!grid) return "";
  return grid[0] === 1 ? ", in a row" : `, ${grid[0]} × ${grid[1]}`;
}

// Tokens are gone through like the values of a slider, by pointer or by keys.
function explore(canvas, stage, when) {
  const { explanation: { patches: [rows, cols] } } = drawn;
  const most = stage.kept.length;
  let chosen = null;
  const choose = (token) => {
    chosen = token;
    drawStage(canvas, stage, token);
    const text = token === null ? "" : described(stage.kept[token], token, most);
    at("detail").textContent = text ? `${text[0].toUpperCase()}${text.slice(1)}, ${when}.` : HINT;
    canvas.setAttribute("aria-valuenow", (token ?? 0) + 1);
    canvas.setAttribute("aria-valuetext", text || `${count(most, "token")}, none chosen`);
  };
  for (const [key, value] of Object.entries({
    tabindex: "0", role: "slider", "aria-label": `Tokens ${when}`, "aria-valuemin": "1", "aria-valuemax": most,
  })) canvas.setAttribute(key, value);
  choose(null);
  canvas.addEventListener("keydown", (event) => {
    const last = most - 1;
    const now = chosen ?? -1;
    const next = {
      ArrowRight: Math.min(last, now + 1), ArrowUp: Math.min(last, now + 1), PageUp: Math.min(last, now + 10),
      ArrowLeft: Math.max(0, now - 1), ArrowDown: Math.max(0, now - 1), PageDown: Math.max(0, now - 10),
      Home: 0, End: last, Escape: null,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(next);
  });
  const pointed = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const col = Math.floor(((event.clientX - box.left) / box.width) * cols);
    const token = strongest(stage.kept, row * cols + col);
    if (token !== chosen) choose(token);
  };
  canvas.addEventListener("pointermove", pointed);
  canvas.addEventListener("pointerdown", pointed);
  canvas.addEventListener("pointerleave", () => choose(null));
  canvas.addEventListener("blur", () => choose(null));
}

// The token that has most from a patch, or null where none has any.
function strongest(kept, patch) {
  let best = null;
  let most = 0;
  kept.forEach(({ patches, weights }, token) => {
    const place = patches.indexOf(patch);
    if (place >= 0 && weights[place] > most) [best, most] = [token, weights[place]];
  });
  return best;
}

function described({ patches, weights }, token, most) {
  const { explanation: { patches: [, cols] } } = drawn;
  const place = weights.indexOf(Math.max(...weights));
  const where = `row ${Math.floor(patches[place] / cols) + 1}, column ${(patches[place] % cols) + 1}`;
  const head = `token ${token + 1} of ${most}`;
  if (patches.length === 1) return `${head} is the patch at ${where}`;
  if (mixes()) return `${head} is the average of ${patches.length} patches, from ${where} on`;
  return `${head} holds values from ${patches.length} patches, most (${percent(weights[place])}) from ${where}`;
}

// What the model sees, darker where less of a patch is left: of all tokens, or of a chosen one.
function drawStage(canvas, stage, token) {
  const { explanation: { seen, patches: [rows, cols] }, bitmap } = drawn;
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.fillStyle = "#6b7686";
  context.fillRect(0, 0, width, height);
  if (bitmap) {
    const { width: w, height: h } = bitmap;
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, seen.left * w, seen.top * h, seen.width * w, seen.height * h, 0, 0, width, height);
  }
  if (!stage.shares) return;
  if (mixes() && token === null) {
    drawGroups(canvas, stage);
    return;
  }
  let weights = stage.shares;
  if (token !== null) {
    weights = new Array(rows * cols).fill(0);
    stage.kept[token].patches.forEach((patch, i) => (weights[patch] = stage.kept[token].weights[i]));
  }
  // Fully bright is twice an even share: one patch that gives much more must not darken the rest.
  const full = Math.min(Math.max(...weights), token === null ? 2 / (rows * cols) : 1);
  const across = width / cols;
  const down = height / rows;
  weights.forEach((weight, patch) => {
    const box = [(patch % cols) * across, Math.floor(patch / cols) * down, across, down];
    const light = full ? Math.min(1, weight / full) : 0;
    context.fillStyle = `rgba(${DIM}, ${0.82 * (1 - light)})`;
    context.fillRect(...box);
    if (weight === 0 && token === null) hatch(context, ...box);
  });
  lattice(canvas, rows, cols, 1, "rgba(255, 255, 255, .3)");
  if (stage.grid?.[0] > 1) lattice(canvas, ...stage.grid, 3, "rgba(255, 255, 255, .7)");
  if (token === null) return;
  context.strokeStyle = "#ffd24a";
  context.lineWidth = 5;
  for (const patch of stage.kept[token].patches) {
    context.strokeRect((patch % cols) * across + 2, Math.floor(patch / cols) * down + 2, across - 4, down - 4);
  }
}

// The patches of each token in their average colour, and lines between tokens.
function drawGroups(canvas, stage) {
  const { explanation: { patches: [rows, cols] } } = drawn;
  const context = canvas.getContext("2d");
  const small = element("canvas");
  [small.width, small.height] = [cols, rows];
  const little = small.getContext("2d");
  little.imageSmoothingQuality = "high";
  little.drawImage(canvas, 0, 0, cols, rows);
  const { data } = little.getImageData(0, 0, cols, rows);
  const across = canvas.width / cols;
  const down = canvas.height / rows;
  const corner = (patch) => [(patch % cols) * across, Math.floor(patch / cols) * down];
  // A patch in several windows goes with the token that has most of it.
  const owner = new Array(rows * cols).fill(-1);
  const most = new Array(rows * cols).fill(0);
  const colours = stage.kept.map(({ patches, weights }, token) => {
    patches.forEach((patch, i) => {
      if (weights[i] > most[patch]) [owner[patch], most[patch]] = [token, weights[i]];
    });
    if (patches.length === 1) return "transparent";
    const mean = (part) => patches.reduce((sum, patch, i) => sum + weights[i] * data[4 * patch + part], 0);
    return `rgba(${[0, 1, 2].map((part) => Math.round(mean(part))).join(", ")}, .75)`;
  });
  owner.forEach((token, patch) => {
    context.fillStyle = colours[token] ?? `rgba(${DIM}, .82)`;
    context.fillRect(...corner(patch), across, down);
    if (token < 0) hatch(context, ...corner(patch), across, down);
  });
  context.strokeStyle = "rgba(255, 255, 255, .7)";
  context.lineWidth = 2;
  context.beginPath();
  owner.forEach((token, patch) => {
    const [left, top] = corner(patch);
    if (patch % cols && owner[patch - 1] !== token) {
      context.moveTo(left, top);
      context.lineTo(left, top + down);
    }
    if (patch >= cols && owner[patch - cols] !== token) {
      context.moveTo(left, top);
      context.lineTo(left + across, top);
    }
  });
  context.stroke();
}

// Lines between patches, and bolder ones between the tokens of a grid.
function lattice(canvas, rows, cols, wide, colour) {
  const context = canvas.getContext("2d");
  context.strokeStyle = colour;
  context.lineWidth = wide;
  context.beginPath();
  for (let col = 1; col < cols; col++) {
    context.moveTo((col * canvas.width) / cols, 0);
    context.lineTo((col * canvas.width) / cols, canvas.height);
  }
  for (let row = 1; row < rows; row++) {
    context.moveTo(0, (row * canvas.height) / rows);
    context.lineTo(canvas.width, (row * canvas.height) / rows);
  }
  context.stroke();
}

function hatch(context, left, top, wide, high) {
  context.strokeStyle = "rgba(255, 255, 255, .4)";
  context.lineWidth = 1.5;
  context.beginPath();
  for (const share of [0.25, 0.5, 0.75, 1]) {
    context.moveTo(left + share * wide, top);
    context.lineTo(left, top + share * high);
    context.moveTo(left + wide, top + share * high);
    context.lineTo(left + share * wide, top + high);
  }
  context.stroke();
}

// ── costs ──────────────────────────────────────────────────────────────────────────────────────

function showCosts() {
  const { explanation: { blocks, macs, unpooled_macs: unpooled } } = drawn;
  const times = unpooled / macs;
  at("costs-note").textContent =
    `${amount(macs)} MACs for this image` +
    (times > 1.005 ? `, ${times.toFixed(1)} times fewer than ${amount(unpooled)} with all tokens kept.` : ".");
  at("legend").hidden = times <= 1.005;
  at("rows").replaceChildren(
    ...blocks.map((block) =>
      element(
        "tr", {},
        element("th", { scope: "row" }, String(block.block)),
        ...[block.tokens, amount(block.macs), amount(block.unpooled_macs)].map((v) => element("td", {}, String(v))),
      ),
    ),
  );
  at("costs").hidden = false;
  drawChart();
}

// Drawn at the width there is, so that letters keep their size.
function drawChart() {
  const { explanation: { blocks, macs } } = drawn;
  const width = at("chart").clientWidth;
  const [top, high, left] = [20, 150, 46];
  const most = Math.max(...blocks.map((block) => block.unpooled_macs));
  const step = (width - left) / blocks.length;
  const wide = Math.max(2, Math.min(64, step * 0.72));
  const tall = (value) => (high * value) / most;
  const every = Math.ceil(32 / step); // labels that have room
  const [unit, size] = unitOf(Math.max(...blocks.map((block) => block.macs)));
  const svg = shape("svg", { viewBox: `0 0 ${width} ${top + high + 44}`, height: top + high + 44, role: "img" });
  const first = blocks[0];
  const last = blocks.at(-1);
  svg.setAttribute(
    "aria-label",
    `Bars of the ${blocks.length} blocks: ${amount(macs)} MACs in all, block ${first.block} ` +
      `${amount(first.macs)} with ${first.tokens} tokens, block ${last.block} ${amount(last.macs)} with ` +
      `${last.tokens} tokens. The table below has them all.`,
  );
  svg.append(shape("line", { class: "axis", x1: left, x2: width, y1: top + high, y2: top + high }));
  blocks.forEach((block, index) => {
    const middle = left + (index + 0.5) * step;
    const box = { x: middle - wide / 2, width: wide, rx: Math.min(4, wide / 4) };
    const ghost = tall(block.unpooled_macs);
    const bar = Math.max(1, tall(block.macs));
    if (block.unpooled_macs > block.macs) {
      svg.append(shape("rect", { class: "ghost", ...box, y: top + high - ghost, height: ghost }));
    }
    svg.append(shape("rect", { class: "bar", ...box, y: top + high - bar, height: bar }));
    if (index % every) return;
    svg.append(
      shape("text", { class: "value", x: middle, y: top + high - bar - 6 }, digits(block.macs / size)),
      shape("text", { x: middle, y: top + high + 17 }, String(block.block)),
      shape("text", { x: middle, y: top + high + 35 }, String(block.tokens)),
    );
  });
  svg.append(
    shape("text", { class: "side", x: 0, y: top - 6 }, unit && `in ${unit}`),
    shape("text", { class: "side", x: 0, y: top + high + 17 }, "block"),
    shape("text", { class: "side", x: 0, y: top + high + 35 }, "tokens"),
  );
  at("chart").replaceChildren(svg);
}

// ── the ways in ────────────────────────────────────────────────────────────────────────────────

function mark(name) {
  for (const button of document.querySelectorAll("[data-sample]")) {
    button.setAttribute("aria-pressed", String(button.dataset.sample === name));
  }
}

// Only what the model can name: it would have to be wrong of the others.
function offerSamples(classes) {
  const buttons = [...document.querySelectorAll("[data-sample]")];
  for (const button of buttons) button.hidden = !classes.has(button.dataset.sample);
  at("samples").hidden = buttons.every((button) => button.hidden);
}

function take(files) {
  const [file] = files;
  if (!file) return;
  mark(null);
  look(file, file.name || "image");
}

// A phone takes photographs itself; elsewhere there may be a camera to look through.
const live = at("live");
const video = at("video");
live.hidden = !navigator.mediaDevices || matchMedia("(any-pointer: coarse)").matches;

function stopCamera() {
  for (const track of video.srcObject?.getTracks() ?? []) track.stop();
  video.srcObject = null;
  video.hidden = true;
  live.textContent = "Use the camera";
}

live.addEventListener("click", async () => {
  if (video.srcObject) {
    const canvas = element("canvas");
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => take([new File([blob], "camera", { type: "image/png" })]), "image/png");
    return;
  }
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    await video.play();
  } catch (error) {
    stopCamera();
    clear();
    showProblem(new RequestError(-1, `The camera cannot be used: ${error.message}`));
    return;
  }
  at("image").hidden = at("invite").hidden = true;
  video.hidden = false;
  live.textContent = "Take the photo";
});

for (const input of [at("file"), at("camera")]) {
  input.addEventListener("change", () => {
    take(input.files);
    input.value = ""; // the same file again is a change too
  });
}

for (const button of document.querySelectorAll("[data-sample]")) {
  button.addEventListener("click", async () => {
    mark(button.dataset.sample);
    clear(); // at once, while the sample is fetched
    try {
      const response = await fetch(button.querySelector("img").src);
      const blob = await response.blob();
      if (button.getAttribute("aria-pressed") === "true") await look(blob, button.dataset.sample); // still wanted
    } catch {
      showProblem(new RequestError(0, ""));
    }
  });
}
mark(null);

addEventListener("dragover", (event) => {
  event.preventDefault();
  at("drop").classList.add("over");
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) at("drop").classList.remove("over");
});
addEventListener("drop", (event) => {
  event.preventDefault();
  at("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
addEventListener("paste", (event) => take(event.clipboardData.files));

let narrow = innerWidth;
addEventListener("resize", () => {
  if (!drawn || innerWidth === narrow) return;
  narrow = innerWidth;
  drawChart();
});

model()
  .then(({ name, params_m: params, class_names: classes, precision }) => {
    at("model").textContent =
      `${name}, ${precision}, ${params.toPrecision(3)} M parameters, ${classes.length} classes`;
    offerSamples(new Set(classes));
  })
  .catch(() => {});
