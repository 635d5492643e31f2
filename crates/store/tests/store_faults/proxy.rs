//! An HTTP proxy that injects faults between a client and a store. Each connection has one request. The proxy reads the
//! whole request and response, so it can inject a fault at any byte.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a fault does to a request or its response.
#[derive(Clone, Debug)]
pub(crate) enum Harm {
    /// The proxy responds with this status and body. The server does not receive the request.
    Answer(u16, &'static str),
    /// The connection breaks after this number of bytes of the request body. The server receives nothing.
    CutRequest(usize),
    /// The server processes the request, and the connection breaks after this number of bytes of the response.
    CutAnswer(usize),
    /// The server processes the request, and the proxy delays the response.
    Delay(Duration),
    /// The proxy flips one bit in the middle of the request body.
    Damage,
    /// The proxy responds with the server's first response to the same request, not with the newest response.
    Stale,
    /// The server processes the request, and the proxy changes or removes these headers of the response.
    Headers(&'static [(&'static str, Option<&'static str>)]),
    /// The server processes the request, and the proxy replaces a text in the body of the response by another text.
    Text(&'static str, &'static str),
}

/// A fault: which requests it affects, how often, and what it does.
#[derive(Clone)]
pub(crate) struct Fault {
    pub(crate) on: fn(&Request) -> bool,
    pub(crate) times: usize,
    pub(crate) harm: Harm,
}

/// A request. `Fault::on` selects the requests that a fault affects.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Request {
    /// The value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

#[derive(Default)]
struct Script {
    faults: Vec<Fault>,
    done: usize,
    asked: Vec<Request>,
    bodies: Vec<Vec<u8>>,
    first: Vec<(String, Vec<u8>)>,
    sessions: Vec<(String, Vec<u8>)>,
}

impl Script {
    /// The response to Google's status check of a resumable upload
    /// (<https://cloud.google.com/storage/docs/performing-resumable-uploads#status-check>). fake-gcs-server treats a
    /// status check as the end of the upload, so the proxy itself responds, with the server's last response to this
    /// upload.
    fn progress(&self, request: &Request) -> Option<Vec<u8>> {
        if request.header("content-range") != Some("bytes */*") {
            return None;
        }
        let session = self
            .sessions
            .iter()
            .find(|(target, _)| *target == request.target);
        Some(session.map_or_else(
            || b"HTTP/1.1 308 Resume\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".to_vec(),
            |(_, answer)| answer.clone(),
        ))
    }

    fn keep_progress(&mut self, request: &Request, answer: &[u8]) {
        let taken = answer.starts_with(b"HTTP/1.1 308") || answer.starts_with(b"HTTP/1.1 200");
        if taken && request.header("content-range").is_some() {
            self.sessions
                .retain(|(target, _)| *target != request.target);
            self.sessions
                .push((request.target.clone(), answer.to_vec()));
        }
    }
}

/// The proxy, which runs until the test's runtime ends.
#[derive(Clone)]
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    script: Arc<Mutex<Script>>,
}

impl Proxy {
    /// Starts a proxy in front of the server `http://host:port/...`.
    pub(crate) async fn start(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap(),
            script: Arc::default(),
        };
        let target = server.split('/').nth(2).unwrap().to_owned();
        let own = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (own, target) = (own.clone(), target.clone());
                tokio::spawn(async move { Box::pin(own.serve(client, &target)).await });
            }
        });
        proxy
    }

    /// The URL of the server, with the address of the proxy.
    pub(crate) fn url(&self, server: &str) -> String {
        let rest = server.splitn(4, '/').nth(3).unwrap_or_default();
        format!("http://{}/{rest}", self.address)
            .trim_end_matches('/')
            .to_owned()
    }

    /// Replaces all faults of the proxy by these faults.
    pub(crate) fn harm(&self, faults: &[Fault]) {
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        script.faults = faults.to_vec();
        script.done = 0;
        script.asked.clear();
        script.bodies.clear();
    }

    /// The requests since the last call of [`Self::harm`], without their bodies.
    pub(crate) fn asked(&self) -> Vec<Request> {
        self.script.lock().unwrap().asked.clone()
    }

    /// The bodies of the requests since the last call of [`Self::harm`], without bodies of 64 KiB or more.
    pub(crate) fn bodies(&self) -> Vec<Vec<u8>> {
        self.script.lock().unwrap().bodies.clone()
    }

    /// The number of injected faults since the last call of [`Self::harm`].
    pub(crate) fn done(&self) -> usize {
        self.script
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .done
    }

    fn chosen(&self, request: &Request) -> Option<Harm> {
        let mut script = self.script.lock().unwrap();
        script.asked.push(Request {
            body: Vec::new(),
            ..request.clone()
        });
        let fault = script
            .faults
            .iter_mut()
            .find(|fault| fault.times > 0 && (fault.on)(request))?;
        fault.times = fault
            .times
            .saturating_sub(usize::from(fault.times < usize::MAX));
        let harm = fault.harm.clone();
        script.done += 1;
        Some(harm)
    }

    async fn serve(&self, mut client: TcpStream, target: &str) -> Option<()> {
        let (mut request, expects) = read_head(&mut client).await?;
        let harm = self.chosen(&request);
        if expects {
            client
                .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                .await
                .ok()?;
        }
        let limit = match harm {
            Some(Harm::CutRequest(bytes)) => bytes,
            _ => usize::MAX,
        };
        read_body(&mut client, &mut request, limit).await?;
        if request.body.len() < 65_536 {
            let mut script = self.script.lock().unwrap();
            script.bodies.push(request.body.clone());
        }
        match &harm {
            Some(Harm::CutRequest(_)) => return None,
            Some(Harm::Answer(status, body)) => {
                let answer = format!(
                    "HTTP/1.1 {status} Fault\r\nconnection: close\r\ncontent-type: application/xml\r\n\
                     content-length: {}\r\n\r\n{body}",
                    body.len()
                );
                client.write_all(answer.as_bytes()).await.ok()?;
                client.shutdown().await.ok()?;
                return Some(());
            }
            Some(Harm::Damage) if !request.body.is_empty() => {
                let middle = request.body.len() / 2;
                request.body[middle] ^= 1;
            }
            _ => {}
        }
        let progress = self.script.lock().unwrap().progress(&request);
        let answer = match progress {
            Some(answer) => answer,
            None => forward(&request, target).await?,
        };
        let asked = format!("{} {}", request.method, request.target);
        let answer = {
            let mut script = self.script.lock().unwrap();
            script.keep_progress(&request, &answer);
            let first = script.first.iter().find(|(known, _)| *known == asked);
            match (first, &harm) {
                (Some((_, first)), Some(Harm::Stale)) => first.clone(),
                (Some(_), _) => answer,
                (None, _) => {
                    // `script.first` keeps the first answer to a listing, or to a GET of an object's metadata, for
                    // `Harm::Stale`. It keeps no content of objects.
                    if request.method == "GET" && answer.len() < 1 << 20 {
                        script.first.push((asked, answer.clone()));
                    }
                    answer
                }
            }
        };
        let answer = match harm {
            Some(Harm::Headers(headers)) => headers.iter().fold(answer, |answer, (name, value)| {
                with_header(&answer, name, *value)
            }),
            Some(Harm::Text(old, new)) => with_text(&answer, old, new),
            _ => answer,
        };
        match harm {
            Some(Harm::Delay(by)) => tokio::time::sleep(by).await,
            Some(Harm::CutAnswer(bytes)) => {
                client
                    .write_all(&answer[..bytes.min(answer.len())])
                    .await
                    .ok()?;
                return None;
            }
            _ => {}
        }
        client.write_all(&answer).await.ok()?;
        client.shutdown().await.ok()
    }
}

/// Removes or replaces a header of a response.
fn with_header(answer: &[u8], name: &str, value: Option<&str>) -> Vec<u8> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    let Some(end) = end else {
        return answer.to_vec();
    };
    let (head, rest) = answer.split_at(end);
    let head = String::from_utf8_lossy(head);
    let lines = head.split("\r\n").filter(|line| {
        let found = line.split(':').next().unwrap_or_default();
        !found.eq_ignore_ascii_case(name)
    });
    let mut lines: Vec<String> = lines.map(str::to_owned).collect();
    lines.extend(value.map(|value| format!("{name}: {value}")));
    [lines.join("\r\n").as_bytes(), rest].concat()
}

/// Replaces a text in the body of a response, and corrects the header `content-length`.
fn with_text(answer: &[u8], old: &str, new: &str) -> Vec<u8> {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return answer.to_vec();
    };
    let chunked = head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked");
    // A chunked response of the test server has one chunk.
    let content = match body.split_once("\r\n") {
        Some((_, rest)) if chunked => rest.split("\r\n0\r\n").next().unwrap_or_default(),
        _ => body,
    };
    let content = content.replacen(old, new, 1);
    let length = content.len().to_string();
    let whole = format!("{head}\r\n\r\n{content}");
    let whole = with_header(whole.as_bytes(), "transfer-encoding", None);
    with_header(&whole, "content-length", Some(&length))
}

/// Reads the head of a request. The flag is true if the client waits for `100 Continue` before it sends the body.
async fn read_head(client: &mut TcpStream) -> Option<(Request, bool)> {
    let mut read = Vec::new();
    let end = loop {
        let mut piece = vec![0; 16_384];
        let length = client.read(&mut piece).await.ok()?;
        if length == 0 {
            return None;
        }
        read.extend_from_slice(&piece[..length]);
        if let Some(end) = read.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
    };
    let body = read.split_off(end + 4);
    let head = String::from_utf8(read).ok()?;
    let mut words = head.split_whitespace();
    let request = Request {
        method: words.next()?.to_owned(),
        target: words.next()?.to_owned(),
        body,
        head: head.clone(),
    };
    let expects = request.header("expect").is_some();
    Some((request, expects))
}

/// Reads the rest of the request body, which [`read_head`] has not read. Does not decode a chunked body. Stops when
/// `limit` bytes of the body are read.
async fn read_body(client: &mut TcpStream, request: &mut Request, limit: usize) -> Option<()> {
    let length: Option<usize> = request
        .header("content-length")
        .and_then(|text| text.parse().ok());
    let chunked = request
        .header("transfer-encoding")
        .is_some_and(|text| text.eq_ignore_ascii_case("chunked"));
    loop {
        let read = request.body.len();
        let whole = match length {
            Some(length) => read >= length,
            None => !chunked || request.body.ends_with(b"0\r\n\r\n"),
        };
        if whole || read >= limit {
            return Some(());
        }
        let mut piece = vec![0; 262_144];
        let now = client.read(&mut piece).await.ok()?;
        if now == 0 {
            return None;
        }
        request.body.extend_from_slice(&piece[..now]);
    }
}

async fn forward(request: &Request, target: &str) -> Option<Vec<u8>> {
    let mut server = TcpStream::connect(target).await.ok()?;
    let mut head = String::new();
    for line in request.head.trim_end().split("\r\n") {
        let name = line.split(':').next().unwrap_or_default();
        if !["expect", "connection"]
            .iter()
            .any(|hop| name.eq_ignore_ascii_case(hop))
        {
            head.push_str(line);
            head.push_str("\r\n");
        }
    }
    head.push_str("connection: close\r\n\r\n");
    server.write_all(head.as_bytes()).await.ok()?;
    // A server that rejects the request may close the connection before it has read the body, so a write error is
    // ignored.
    let _ = server.write_all(&request.body).await;
    let mut answer = Vec::new();
    let _ = server.read_to_end(&mut answer).await;
    (!answer.is_empty()).then_some(answer)
}
