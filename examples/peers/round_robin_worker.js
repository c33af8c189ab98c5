// A round-robin worker in JavaScript. It turns the arguments of each message into capitals.
//
//     npm install zeromq
//     node round_robin_worker.js tcp://127.0.0.1:6714 [KEYFILE]
//
// The protocol is docs/dialects/round-robin.md.
"use strict";
const crypto = require("crypto");
const fs = require("fs");
const zmq = require("zeromq");

const SLOTS = 2;
const HEARTBEAT_MS = 5_000;
const LMQ = Buffer.from("LMQv100");
const EMPTY = Buffer.alloc(0);
const [PING, PONG, EXEC, TRACKEXEC, , RESPONSE] = [1, 2, 3, 4, 5, 6].map((one) => Buffer.of(one));
const [INCREMENT, REGISTER, DEREGISTER] = [7, 8, 9].map((one) => Buffer.of(one));

const [endpoint, keyFile] = process.argv.slice(2);
if (endpoint === undefined) {
  console.error("usage: node round_robin_worker.js ENDPOINT [KEYFILE]");
  process.exit(2);
}

// ZeroMQ writes keys in its Z85: five characters are four bytes.
const Z85 =
  "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

function fromZ85(text) {
  const words = text.match(/.{5}/g).map((five) =>
    [...five].reduce((sum, one) => sum * 85 + Z85.indexOf(one), 0));
  return Buffer.concat(words.map((word) => Buffer.from(word.toString(16).padStart(8, "0"), "hex")));
}

function toZ85(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 4)
    for (let power = 85 ** 4; power >= 1; power /= 85)
      text += Z85[Math.floor(bytes.readUInt32BE(at) / power) % 85];
  return text;
}

// The options of a socket with a key. The public key is computed from the secret one.
function curve(file) {
  const text = fs.readFileSync(file, "utf8");
  const field = (name) => text.match(new RegExp(`^${name} = "(.*)"$`, "m"))[1];
  const head = Buffer.from("302e020100300506032b656e04220420", "hex"); // PKCS 8, X25519
  const der = Buffer.concat([head, fromZ85(field("secret"))]);
  const secret = crypto.createPrivateKey({ key: der, format: "der", type: "pkcs8" });
  const whole = crypto.createPublicKey(secret).export({ format: "der", type: "spki" });
  return {
    curveServerKey: field("broker"),
    curveSecretKey: field("secret"),
    curvePublicKey: toZ85(whole.subarray(-32)),
  };
}

const server = Buffer.from(endpoint);
const suffix = `js-${process.pid}-${crypto.randomBytes(4).toString("hex")}`;
const socket = new zmq.Router({
  routingId: `${endpoint}:${suffix}`,
  mandatory: true, // a message to an unknown address is an error, and not dropped
  linger: 1_000,
  ...(keyFile ? curve(keyFile) : {}),
});

// A socket of this library sends one message at a time, so messages form a queue. While there has
// been no connection yet, the server is no known address.
let queue = Promise.resolve();
function send(...frames) {
  queue = queue.then(async () => {
    for (;;) {
      try {
        return await socket.send([server, ...frames, EMPTY]);
      } catch (error) {
        if (error.code !== "EHOSTUNREACH") throw error;
        await new Promise((resume) => setTimeout(resume, 50));
      }
    }
  });
}

let isListed = false;
let count = 0;
const newId = () => Buffer.from(`${(count += 1)}`);
const track = (...args) => send(EMPTY, LMQ, TRACKEXEC, newId(), ...args);
const deregister = () => send(EMPTY, LMQ, EXEC, Buffer.from("WORKER"), DEREGISTER);

// Messages that were in transit at the end of a connection are lost. DEREGISTER returns them all.
function join() {
  send(EMPTY, LMQ, PING, newId());
  deregister();
  isListed = false;
  heartbeat();
}

function heartbeat() {
  if (isListed) track(Buffer.from("ongoing"));
  else track(REGISTER, Buffer.from(`${SLOTS}`));
  isListed = true;
}

// A result for the frames of a message: a worker would do something useful here.
function work(key, args) {
  const capital = (byte) => (byte >= 97 && byte <= 122 ? byte - 32 : byte);
  return (args.length ? args : [key]).map((frame) => Buffer.from(frame.map(capital)));
}

function receive([, empty, version, command, id, ...rest]) {
  if (empty.length || !version.equals(LMQ)) return;
  const end = rest.map((frame) => frame.length === 0).lastIndexOf(true);
  const [key, ...args] = rest.slice(0, end);
  if (command.equals(PING)) {
    send(EMPTY, LMQ, PONG, id);
    if (id.toString() === "RESTARTED") join();
  } else if (command.equals(RESPONSE) && `${key}`.startsWith("ERROR ")) {
    console.error(`${key}`);
    isListed = false; // the next heartbeat is a REGISTER
  } else if (command.equals(EXEC) || command.equals(TRACKEXEC)) {
    const result = work(key, args);
    const route = rest.slice(end + 1).reverse(); // the address of a client, or none
    if (command.equals(TRACKEXEC)) send(...route, EMPTY, LMQ, RESPONSE, id, ...result);
    send(EMPTY, LMQ, EXEC, newId(), INCREMENT);
  }
}

async function main() {
  socket.events.on("handshake", join); // of the first connection, and of each later one
  socket.events.on("handshake:error:auth", ({ error }) => {
    console.error(`the broker refused the key: ${error.message}`);
    process.exit(2);
  });
  socket.connect(endpoint);
  setInterval(heartbeat, HEARTBEAT_MS);
  process.once("SIGTERM", () => {
    deregister();
    queue.then(() => socket.close()).then(() => process.exit(0));
  });
  for await (const frames of socket) receive(frames);
}

main();
