// Where the page's answers come from: the model itself, run in this browser by ONNX Runtime Web. Files
// beside the page: config.json and preprocessor_config.json as Hugging Face has them, page.json with
// what the page draws, and the ONNX files. Images do not leave the device.

const OUTSIDE = "The model could not be loaded. Check the connection and open the page again.";

export const WORDS = { 0: OUTSIDE, 415: "This browser cannot read that file as an image." };

export class RequestError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const [first, second] = document.querySelectorAll("#times dt");
first.textContent = "in the model";
second.textContent = "with preparing the image";
document.querySelector("footer p").textContent = "Images stay on this device.";

async function load(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw new RequestError(0, `${path}: ${error.message}`);
  }
  if (!response.ok) throw new RequestError(0, `${path}: ${response.status}`);
  return response;
}
const read = async (path) => (await load(path)).json();

const described = Promise.all(["config.json", "preprocessor_config.json", "page.json"].map(read));
const session = described.then(([, , page]) => open(page));
session.catch(() => {}); // told when an image is asked about

export async function model() {
  const [config, , page] = await described;
  return { ...page.model, class_names: Object.values(config.id2label) };
}

// ── the runtime and the model ──────────────────────────────────────────────────────────────────

// By WebGPU where there is one, which computes in float32; else by WebAssembly, in int8 if there is.
async function open(page) {
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  if (adapter) {
    try {
      return await start(page, "webgpu", "onnx/model");
    } catch (error) {
      console.info(`WebGPU is not used: ${error.message}`);
    }
  }
  return start(page, "wasm", page.int8 ? "onnx/model_quantized" : "onnx/model");
}

async function start(page, provider, stem) {
  const { base, integrity } = page.runtime;
  const part = async (name) => load(base + name, integrity ? { integrity: integrity[name] } : {});
  const names = provider === "webgpu" ? ["ort.webgpu.bundle.min.mjs", "ort-wasm-simd-threaded.asyncify.wasm"]
                                      : ["ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"];
  const files = [load(`${stem}.onnx`), ...(page.tokens ? [load(`${stem}.tokens`)] : [])];
  const [script, wasm, ...parts] = await Promise.all([...names.map(part), ...files]);
  const url = URL.createObjectURL(new Blob([await script.text()], { type: "text/javascript" }));
  const ort = await import(url);
  URL.revokeObjectURL(url);
  ort.env.wasm.wasmBinary = await wasm.arrayBuffer();
  ort.env.wasm.numThreads = 1; // more would need headers that a plain file server does not send
  // What makes the graph tell of its tokens is appended to it: protobuf joins the two.
  const graph = new Uint8Array(await new Blob(await Promise.all(parts.map((p) => p.arrayBuffer()))).arrayBuffer());
  const opened = await ort.InferenceSession.create(graph, { executionProviders: [provider], logSeverityLevel: 3 });
  document.documentElement.dataset.provider = provider;
  return (values, shape) => opened.run({ pixel_values: new ort.Tensor("float32", values, [1, ...shape]) });
}

// ── an image as the model wants it ─────────────────────────────────────────────────────────────

// As `hvt predict` does: Pillow's resize, a crop from the centre, mean and standard deviation.
async function pixels(blob) {
  const [, processor] = await described;
  const options = { imageOrientation: "from-image", colorSpaceConversion: "none" }; // Pillow converts no colours
  const bitmap = await createImageBitmap(blob, options).catch(() => {
    throw new RequestError(415, "");
  });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  return normalised(data, canvas.width, canvas.height, processor);
}

function normalised(data, width, height, processor) {
  const { size, crop_size: crop, image_mean: mean, image_std: std } = processor;
  const short = Math.min(width, height);
  const side = (n) => Math.floor((size.shortest_edge * n) / short);
  const [wide, high] = size.shortest_edge ? [side(width), side(height)] : [size.width, size.height];
  const across = resized(data, width, height, wide, processor.resample); // (height, wide), transposed
  const small = resized(across, height, wide, high, processor.resample); // (wide, high), transposed back
  const left = offset(wide, crop.width);
  const top = offset(high, crop.height);
  const values = new Float32Array(3 * crop.width * crop.height);
  let place = 0;
  for (let channel = 0; channel < 3; channel++) {
    for (let y = top; y < top + crop.height; y++) {
      for (let x = left; x < left + crop.width; x++) {
        const inside = x >= 0 && x < wide && y >= 0 && y < high;
        const value = inside ? small[4 * (y * wide + x) + channel] : 0;
        values[place++] = (value / 255 - mean[channel]) / std[channel];
      }
    }
  }
  return { values, shape: [3, crop.height, crop.width], resize: [wide, high], crop: [left, top, crop.width, crop.height] };
}

// torchvision's: halves go to the even number.
function offset(length, crop) {
  const half = (length - crop) / 2;
  if (half < 0) return Math.ceil(half);
  return half % 1 === 0.5 && Math.floor(half) % 2 === 0 ? Math.floor(half) : Math.round(half);
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const within = (limit, f) => (x) => (Math.abs(x) < limit ? f(Math.abs(x)) : 0);
const FILTERS = {
  1: [3, within(3, (x) => sinc(x) * sinc(x / 3))],
  2: [1, within(1, (x) => 1 - x)],
  3: [2, within(2, (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : ((-0.5 * x + 2.5) * x - 4) * x + 2))],
  4: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  5: [1, within(1, (x) => (x === 0 ? 1 : sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x))))],
};

// Rows of RGBA bytes resized to `wide`, and transposed, so that a second call resizes the columns.
// Pillow's own arithmetic, to the bit: weights in 22 bits, and bytes between the two passes.
function resized(data, width, height, wide, resample) {
  const result = new Uint8ClampedArray(4 * wide * height);
  const scale = width / wide;
  const [reach, filter] = FILTERS[resample] ?? [0, null];
  const spread = Math.max(1, scale);
  for (let x = 0; x < wide; x++) {
    const centre = (x + 0.5) * scale;
    let from = Math.floor(centre); // nearest
    let weights = [1];
    if (filter && width !== wide) {
      from = Math.max(0, Math.trunc(centre - reach * spread + 0.5));
      const to = Math.min(width, Math.trunc(centre + reach * spread + 0.5));
      weights = Array.from({ length: to - from }, (_, i) => filter((i + from - centre + 0.5) / spread));
      const sum = weights.reduce((a, b) => a + b, 0);
      weights = weights.map((w) => w / sum);
    }
    weights = weights.map((w) => Math.trunc(w * 2 ** 22 + (w < 0 ? -0.5 : 0.5)));
    for (let y = 0; y < height; y++) {
      for (let channel = 0; channel < 3; channel++) {
        let total = 2 ** 21;
        for (let i = 0; i < weights.length; i++) total += data[4 * (y * width + from + i) + channel] * weights[i];
        result[4 * (x * height + y) + channel] = total >> 22;
      }
    }
  }
  return result;
}

// ── the answer ─────────────────────────────────────────────────────────────────────────────────

export const prepare = async (blob) => ({ blob }); // the rest is timed with the answer

export async function predict(image, signal) {
  const run = await session;
  Object.assign(image, await pixels(image.blob));
  if (signal.aborted) throw new Error("aborted");
  const start = performance.now();
  image.outputs = await run(image.values, image.shape);
  const milliseconds = performance.now() - start;
  const logits = Array.from(image.outputs.logits.data);
  const largest = Math.max(...logits);
  const scores = logits.map((x) => Math.exp(x - largest));
  const sum = scores.reduce((a, b) => a + b, 0);
  const [{ id2label: names }] = await described;
  const order = scores.map((_, label) => label).sort((a, b) => scores[b] - scores[a]);
  const top = order.slice(0, 5).map((label) => ({ label, name: names[label], probability: scores[label] / sum }));
  return { predictions: [{ top }], milliseconds };
}

export async function explain({ outputs, resize, crop }) {
  const [, , { hierarchy }] = await described;
  const [left, top, width, height] = crop;
  const seen = { left: left / resize[0], top: top / resize[1], width: width / resize[0], height: height / resize[1] };
  const patches = hierarchy.patches[0] * hierarchy.patches[1];
  let sources = Array.from({ length: patches }, (_, patch) => [patch]); // of each token, its channels' patches
  const stages = hierarchy.stages.map((stage, index) => {
    if (stage.kept || hierarchy.untraced) return stage;
    const output = outputs[`tokens_${index}`];
    sources = output ? followed(output, sources, hierarchy.reduction) : [];
    const shares = new Array(patches).fill(0);
    const kept = sources.map((origins) => {
      const counts = new Map();
      for (const patch of origins) counts.set(patch, (counts.get(patch) ?? 0) + 1);
      const places = [...counts.keys()].sort((a, b) => a - b);
      const weights = places.map((patch) => counts.get(patch) / origins.length);
      places.forEach((patch, i) => (shares[patch] += weights[i] / sources.length));
      return { patches: places, weights };
    });
    return { ...stage, shares, kept };
  });
  return { ...hierarchy, seen, stages };
}

// One step further: which tokens PoWER keeps, (1, N'), or which one each maximum is, (1, D, H', W').
function followed({ data, dims }, before, reduction) {
  if (reduction === "drop") return Array.from(data, (token) => before[token]);
  const [, channels, rows, cols] = dims;
  const tokens = before.length;
  return Array.from({ length: rows * cols }, (_, token) =>
    Array.from({ length: channels }, (_, channel) => {
      const origins = before[data[channel * rows * cols + token] % tokens];
      return origins[channel % origins.length];
    }),
  );
}
