//! Reports the progress of a transfer from its container to the operator over TCP.
//!
//! A container can write its termination message only at its end, and the pod has no token for the API server. The
//! container therefore sends two numbers to each client that connects: the transferred bytes and the total bytes. The
//! operator reads a limited number of bytes, and only displays the numbers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tracing::debug;

/// Port of the progress server. etcd listens on other ports.
pub const PORT: u16 = 2390;

/// Time limit for one connection to the progress server.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum length of a response in bytes.
const MAX_RESPONSE: u64 = 64;

/// Progress of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of bytes transferred so far.
    pub bytes: u64,
    /// Number of bytes to transfer. `None` if unknown.
    pub total: Option<u64>,
}

/// A counter that the transfer writes and the progress server reads.
#[derive(Debug, Default)]
pub struct Meter {
    bytes: AtomicU64,
    total: AtomicU64,
}

impl Meter {
    /// Returns the current progress.
    pub fn read(&self) -> Moved {
        let total = self.total.load(Ordering::Relaxed);
        Moved {
            bytes: self.bytes.load(Ordering::Relaxed),
            total: (total > 0).then_some(total),
        }
    }

    /// Sets the number of transferred bytes.
    pub fn advance_to(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Sets the number of transferred bytes and the total number.
    pub fn set(&self, moved: Moved) {
        self.advance_to(moved.bytes);
        self.total
            .store(moved.total.unwrap_or_default(), Ordering::Relaxed);
    }
}

/// Sends the progress to each client that connects, until the caller drops the future. Returns at once if another
/// process uses the port.
pub async fn serve(now: impl Fn() -> Moved) {
    serve_report(|| written(now()).into_bytes()).await;
}

/// Sends the report to each client that connects, until the caller drops the future. Returns at once if another process
/// uses the port.
pub async fn serve_report(report: impl Fn() -> Vec<u8>) {
    let everywhere = [
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT)),
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)),
    ];
    match TcpListener::bind(&everywhere[..]).await {
        Ok(listener) => serve_at(listener, report).await,
        Err(error) => debug!(%error, "cannot listen on the progress port"),
    }
}

/// Like [`serve_report`], for a port that the caller has opened. Never completes.
pub async fn serve_at(listener: TcpListener, report: impl Fn() -> Vec<u8>) {
    loop {
        match listener.accept().await {
            Ok((mut stream, _)) => {
                // The write has a timeout, because a client that does not read would block the server.
                let _ = timeout(TIMEOUT, stream.write_all(&report())).await;
            }
            Err(error) => {
                debug!(%error, "cannot accept a progress client");
                tokio::time::sleep(TIMEOUT).await;
            }
        }
    }
}

/// Reads the progress from the container at this address. `None` if no valid response arrives in time.
pub async fn read(address: IpAddr) -> Option<Moved> {
    read_at(SocketAddr::from((address, PORT))).await
}

async fn read_at(address: SocketAddr) -> Option<Moved> {
    let report = read_report(address, MAX_RESPONSE).await?;
    parsed(std::str::from_utf8(&report).ok()?)
}

/// Reads a report of at most `limit` bytes from the server at this address. `None` if no report arrives in time.
pub async fn read_report(address: SocketAddr, limit: u64) -> Option<Vec<u8>> {
    let request = async {
        let stream = TcpStream::connect(address).await.ok()?;
        let mut report = Vec::new();
        stream.take(limit).read_to_end(&mut report).await.ok()?;
        Some(report)
    };
    timeout(TIMEOUT, request).await.ok().flatten()
}

fn written(moved: Moved) -> String {
    format!("{} {}\n", moved.bytes, moved.total.unwrap_or_default())
}

fn parsed(text: &str) -> Option<Moved> {
    let (bytes, total) = text.strip_suffix('\n')?.split_once(' ')?;
    let total: u64 = total.parse().ok()?;
    Some(Moved {
        bytes: bytes.parse().ok()?,
        total: (total > 0).then_some(total),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn progress_server_answers_next_client_despite_silent_client() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let moved = Moved {
            bytes: 7,
            total: Some(9),
        };
        let report = move || written(moved).into_bytes();
        let server = tokio::spawn(serve_at(listener, report));
        // `_silent` neither sends nor reads. The server must answer the next client.
        let _silent = TcpStream::connect(address).await.unwrap();
        assert_eq!(read_at(address).await, Some(moved));
        server.abort();
    }

    #[test]
    fn progress_round_trips_and_malformed_progress_is_ignored() {
        for moved in [
            Moved::default(),
            Moved {
                bytes: u64::MAX,
                total: Some(1),
            },
        ] {
            assert_eq!(parsed(&written(moved)), Some(moved));
        }
        for text in ["", "1", "1 2", "a b\n", "-1 2\n", "1 2 3\n"] {
            assert_eq!(parsed(text), None, "{text:?}");
        }
    }
}
