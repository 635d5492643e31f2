// Runs the blob service of Azurite with one account, and creates containers in the account:
//   node serve.js ACCOUNT KEY CONTAINER,... READY-FILE [Azurite's own arguments]
// The script writes READY-FILE when all containers exist.
"use strict";

const { createHmac } = require("node:crypto");
const { writeFileSync } = require("node:fs");
const http = require("node:http");
const path = require("node:path");

const [account, key, containers, ready] = process.argv.splice(2, 4);
const value = (name) => process.argv[process.argv.indexOf(name) + 1];
const host = value("--blobHost");
const port = value("--blobPort");

process.env.AZURITE_ACCOUNTS = `${account}:${key}`;
require(path.join(__dirname, "node_modules/azurite/dist/src/blob/main.js"));

// Creates a container. The request is signed with the account key:
// https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key. The signed text has eleven empty
// lines between PUT and the x-ms headers, one for each standard header that the request does not set.
function create(container) {
  const date = new Date().toUTCString();
  const version = "2022-11-02";
  const text =
    `PUT${"\n".repeat(12)}x-ms-date:${date}\nx-ms-version:${version}\n` +
    `/${account}/${account}/${container}\nrestype:container`;
  const signature = createHmac("sha256", Buffer.from(key, "base64")).update(text, "utf8").digest("base64");
  const headers = {
    authorization: `SharedKey ${account}:${signature}`,
    "x-ms-date": date,
    "x-ms-version": version,
    "content-length": 0,
  };
  return new Promise((resolve) => {
    const request = http.request(
      { host, port, method: "PUT", path: `/${account}/${container}?restype=container`, headers },
      (answer) => {
        answer.resume();
        // 409: an earlier run or attempt has created the container.
        resolve(answer.statusCode === 201 || answer.statusCode === 409 ? null : answer.statusCode);
      },
    );
    request.on("error", (error) => resolve(error.message));
    request.end();
  });
}

async function prepare() {
  for (const container of containers.split(",")) {
    let failure = "";
    for (let attempt = 0; attempt < 100 && failure !== null; attempt++) {
      failure = await create(container);
      if (failure !== null) {
        await new Promise((resolve) => setTimeout(resolve, 100));
      }
    }
    if (failure !== null) {
      console.error(`container ${container}: ${failure}`);
      process.exit(1);
    }
  }
  writeFileSync(ready, "");
}

prepare();
