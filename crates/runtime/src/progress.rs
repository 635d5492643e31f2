//! How far a container is that moves bytes, told to the operator that waits for it.
//!
//! A termination message comes only at the end, and a pod without a token can write nothing of itself. So the
//! container says two numbers to whoever connects, and reads nothing: there is nothing to ask for and nothing to
//! change. What the operator reads is bounded, and for display alone: no decision follows from it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tracing::debug;

/// Where the container tells it: a port nothing of etcd uses.
pub const PORT: u16 = 2390;

/// How long the operator waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// More than two numbers take.
const LONGEST: u64 = 64;

/// Bytes done, and in all where that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Done.
    pub bytes: u64,
    /// In all.
    pub total: Option<u64>,
}

/// How far something is that moves bytes; shared between who moves them and who tells it.
#[derive(Debug, Default)]
pub struct Meter {
    bytes: AtomicU64,
    total: AtomicU64,
}

impl Meter {
    /// The state now.
    pub fn read(&self) -> Moved {
        let total = self.total.load(Ordering::Relaxed);
        Moved {
            bytes: self.bytes.load(Ordering::Relaxed),
            total: (total > 0).then_some(total),
        }
    }

    /// So many bytes are done.
    pub fn advance_to(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// As it is to be read from now on.
    pub fn set(&self, moved: Moved) {
        self.advance_to(moved.bytes);
        self.total
            .store(moved.total.unwrap_or_default(), Ordering::Relaxed);
    }
}

/// Tells what `now` says to everybody who connects, until it is dropped. Without the port nothing is told.
pub async fn serve(now: impl Fn() -> Moved) {
    let everywhere = [
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT)),
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)),
    ];
    match TcpListener::bind(&everywhere[..]).await {
        Ok(listener) => serve_at(listener, now).await,
        Err(error) => debug!(%error, "the progress is not told"),
    }
}

async fn serve_at(listener: TcpListener, now: impl Fn() -> Moved) {
    loop {
        match listener.accept().await {
            Ok((mut stream, _)) => {
                let text = written(now());
                // Nobody who does not read holds this up.
                let _ = timeout(PATIENCE, stream.write_all(text.as_bytes())).await;
            }
            Err(error) => {
                debug!(%error, "the progress was not told");
                tokio::time::sleep(PATIENCE).await;
            }
        }
    }
}

/// What the container at this address says, if it says something.
pub async fn read(address: IpAddr) -> Option<Moved> {
    read_at(SocketAddr::from((address, PORT))).await
}

async fn read_at(address: SocketAddr) -> Option<Moved> {
    let asked = async {
        let stream = TcpStream::connect(address).await.ok()?;
        let mut text = String::new();
        stream.take(LONGEST).read_to_string(&mut text).await.ok()?;
        parsed(&text)
    };
    timeout(PATIENCE, asked).await.ok().flatten()
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
    async fn progress_is_told_to_whoever_asks() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let moved = Moved {
            bytes: 7,
            total: Some(9),
        };
        let server = tokio::spawn(serve_at(listener, move || moved));
        // One that says nothing and hears nothing is in nobody's way.
        let _silent = TcpStream::connect(address).await.unwrap();
        assert_eq!(read_at(address).await, Some(moved));
        server.abort();
    }

    #[test]
    fn what_is_not_two_numbers_is_no_progress() {
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
