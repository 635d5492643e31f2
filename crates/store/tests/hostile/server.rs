//! A hostile HTTP server, whose replies may be endless, slow or of a wrong size.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// A response of the hostile server.
pub(crate) struct Reply {
    status: &'static str,
    headers: String,
    first: Vec<u8>,
    then: Then,
}

/// How a response continues after its first bytes.
pub(crate) enum Then {
    /// The connection closes.
    End,
    /// The server repeats these bytes forever.
    Repeat(Vec<u8>),
    /// The server sends one byte at a time forever, with this pause after each byte.
    Slow(Duration),
}

impl Reply {
    pub(crate) fn new(first: impl Into<Vec<u8>>, then: Then) -> Self {
        // The Azure client requires these headers in the response to a listing.
        let headers = "x-ms-request-id: 6f1d4d3c-6c2a-4f25-9d57-0d5e0a2f9f11\r\n\
                       date: Tue, 24 Nov 2026 00:00:00 GMT\r\n";
        Self {
            status: "200 OK",
            headers: headers.to_owned(),
            first: first.into(),
            then,
        }
    }

    pub(crate) fn with_header(mut self, header: &str) -> Self {
        self.headers.push_str(header);
        self.headers.push_str("\r\n");
        self
    }

    pub(crate) fn with_status(self, status: &'static str) -> Self {
        Self { status, ..self }
    }
}

/// A server that chooses its reply by the head of the request.
pub(crate) struct HostileServer {
    pub(crate) endpoint: String,
    /// Number of bytes of response bodies that were sent to the clients, without the slow bytes of [`Then::Slow`].
    sent: Arc<AtomicU64>,
    requests: Arc<AtomicUsize>,
}

impl HostileServer {
    pub(crate) fn start(reply: impl Fn(&str) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            endpoint: format!("http://{}", listener.local_addr().unwrap()),
            sent: Arc::default(),
            requests: Arc::default(),
        };
        let (sent, requests, reply) = (
            server.sent.clone(),
            server.requests.clone(),
            Arc::new(reply),
        );
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (sent, requests, reply) = (sent.clone(), requests.clone(), reply.clone());
                std::thread::spawn(move || {
                    let mut stream = stream;
                    let head = read_request(&mut stream)?;
                    requests.fetch_add(1, Ordering::SeqCst);
                    respond(&mut stream, reply(&head), &sent)
                });
            }
        });
        server
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

/// Reads a request with its body and returns its head. `None` if the client closes the connection.
fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let read = stream.read(&mut buffer).ok().filter(|read| *read > 0)?;
        request.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&request);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_length = name.eq_ignore_ascii_case("content-length");
            is_length.then(|| value.trim().parse().ok())?
        });
        if body.len() >= length.unwrap_or(0) {
            return Some(head.to_owned());
        }
    }
}

/// Sends a reply. Returns `None` when the client has closed the connection.
fn respond(stream: &mut TcpStream, reply: Reply, sent: &AtomicU64) -> Option<()> {
    let Reply {
        status,
        headers,
        first,
        then,
    } = reply;
    let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&first).ok()?;
    sent.fetch_add(first.len() as u64, Ordering::SeqCst);
    match then {
        Then::End => Some(()),
        Then::Repeat(piece) => loop {
            stream.write_all(&piece).ok()?;
            sent.fetch_add(piece.len() as u64, Ordering::SeqCst);
        },
        Then::Slow(pause) => loop {
            stream.write_all(b" ").ok()?;
            std::thread::sleep(pause);
        },
    }
}
