// Where the page's answers come from: the service, by HTTP.

const LARGEST = 1280; // pixels of a longer side; a larger photograph is made smaller before it is sent

export const WORDS = {
  0: "The service does not answer. Check the connection and try again.",
  413: "That image is too large.",
  415: "That file is not an image in a supported format.",
  422: "That image is damaged.",
  503: "The service is busy. Wait a moment and try again.",
  504: "The service took too long. Wait a moment and try again.",
};

export class RequestError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const model = async () => (await fetch("model")).json();
export const predict = (blob, signal) => ask("predict", blob, signal);
export const explain = (blob, signal) => ask("explain", blob, signal);

// A phone's photograph has 12 million pixels, of which the model wants few. It is sent as it is
// where it is small, and otherwise as a JPEG, upright, white where it was transparent.
export async function prepare(blob, bitmap) {
  const longer = bitmap ? Math.max(bitmap.width, bitmap.height) : 0;
  if (longer <= LARGEST) return blob;
  const scale = LARGEST / longer;
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const small = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
  return small ?? blob;
}

async function ask(path, blob, signal) {
  const type = blob.type.startsWith("image/") ? blob.type : "application/octet-stream";
  let response;
  try {
    response = await fetch(path, { method: "POST", body: blob, headers: { "Content-Type": type }, signal });
  } catch (error) {
    throw signal.aborted ? error : new RequestError(0, "");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new RequestError(response.status, body.detail ?? "");
  return body;
}
