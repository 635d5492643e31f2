//! The listeners of all simulated members, one for each port. Every pod IP address belongs to this machine, so the
//! local address of a connection identifies the member.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use super::fleet::{Answer, Fleet};

/// Without a quorum, etcd answers a request after 5 s plus twice the election timeout of 1 s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(7);
/// Length of the prefix of a gRPC message: one byte of flags, four bytes for the length of the message.
const PREFIX: usize = 5;
/// Pause after an error of `accept`, for example because no file descriptor was free.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves the client port of all members, until the caller aborts the task.
pub(super) async fn serve_clients(listener: TcpListener, fleet: Arc<Fleet>) {
    loop {
        let (stream, address) = accept(&listener, &fleet).await;
        tokio::spawn(serve_client(stream, address, Arc::clone(&fleet)));
    }
}

/// Serves the health port of all members, until the caller aborts the task.
pub(super) async fn serve_health(listener: TcpListener, fleet: Arc<Fleet>) {
    loop {
        let (mut stream, address) = accept(&listener, &fleet).await;
        let fleet = Arc::clone(&fleet);
        tokio::spawn(async move {
            let answered = answer_health(&mut stream, address, &fleet);
            // An error is ignored, because the client has its own deadline.
            let _ = timeout(REQUEST_TIMEOUT, answered).await;
        });
    }
}

/// Returns the next connection to a running member, and the IP address of the member. Closes connections to addresses
/// at which no member runs.
async fn accept(listener: &TcpListener, fleet: &Fleet) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match stream.local_addr() {
                Ok(local) if fleet.runs(local.ip()) => {
                    let _ = stream.set_nodelay(true);
                    return (stream, local.ip());
                }
                _ => {}
            },
            Err(_) => sleep(ACCEPT_RETRY).await,
        }
    }
}

async fn answer_health(stream: &mut TcpStream, address: IpAddr, fleet: &Fleet) -> io::Result<()> {
    let mut request = BytesMut::with_capacity(1024);
    while !request.windows(4).any(|four| four == b"\r\n\r\n") && request.len() < 8192 {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let page = request
        .starts_with(b"GET /metrics ")
        .then(|| fleet.health(address));
    let answer = match page.flatten() {
        Some(page) => format!("HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n{page}"),
        None => "HTTP/1.0 404 Not Found\r\n\r\n".to_owned(),
    };
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

async fn serve_client(stream: TcpStream, address: IpAddr, fleet: Arc<Fleet>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else {
        return;
    };
    while let Some(Ok((request, respond))) = connection.accept().await {
        if !fleet.runs(address) {
            // The member has stopped, so the connection is closed, as a stopped etcd would close it.
            return;
        }
        let fleet = Arc::clone(&fleet);
        tokio::spawn(async move {
            let path = request.uri().path().to_owned();
            // An error is ignored, because it means that the client has ended the call.
            let _ = answer_call(request.into_body(), respond, (address, &path), &fleet).await;
        });
    }
}

async fn answer_call(
    body: RecvStream,
    mut respond: SendResponse<Bytes>,
    (address, path): (IpAddr, &str),
    fleet: &Fleet,
) -> Result<(), h2::Error> {
    let message = read(body).await?;
    let method = path.trim_start_matches("/etcdserverpb.");
    let (code, text) = match fleet.call(address, method, &message) {
        Ok(Some(Answer::Message(message))) => return send(&mut respond, &message),
        Ok(Some(Answer::Refused(refusal))) => refusal.status(),
        Ok(Some(Answer::NoQuorum)) => {
            sleep(REQUEST_TIMEOUT).await;
            (14, "etcdserver: request timed out")
        }
        Ok(None) => {
            respond.send_reset(h2::Reason::CANCEL);
            return Ok(());
        }
        Err(_) => (3, "the request cannot be decoded"),
    };
    let mut head = head();
    head.headers_mut().extend(trailers(code, text));
    respond.send_response(head, true).map(drop)
}

/// Reads the message of a request. Each request of the operator consists of one uncompressed gRPC message.
async fn read(mut body: RecvStream) -> Result<Bytes, h2::Error> {
    let mut all = BytesMut::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        all.extend_from_slice(&piece);
    }
    Ok(all.split_off(PREFIX.min(all.len())).freeze())
}

fn send(respond: &mut SendResponse<Bytes>, message: &[u8]) -> Result<(), h2::Error> {
    let mut stream = respond.send_response(head(), false)?;
    let length = u32::try_from(message.len()).unwrap_or_default();
    let framed = [&[0][..], &length.to_be_bytes(), message].concat();
    stream.send_data(framed.into(), false)?;
    stream.send_trailers(trailers(0, ""))
}

fn head() -> Response<()> {
    let mut head = Response::new(());
    let kind = HeaderValue::from_static("application/grpc");
    head.headers_mut().insert("content-type", kind);
    head
}

fn trailers(code: u8, text: &'static str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", u16::from(code).into());
    if !text.is_empty() {
        trailers.insert("grpc-message", HeaderValue::from_static(text));
    }
    trailers
}

#[cfg(test)]
mod tests;
