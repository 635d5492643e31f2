//! Sends requests over plain HTTP/1.0, without credentials. HTTP/1.0 needs no HTTP client library: it has no chunked
//! encoding, and the server ends the response by closing the connection.

use std::time::Duration;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::port::Error;

/// Maximum size of a response in bytes. etcd's metrics have about 100 KiB.
const MAX_RESPONSE: u64 = 1 << 20;

/// Maximum number of bytes that [`fetch_lines`] returns, including the response headers.
const MAX_KEPT: usize = 16 << 10;

/// Maximum length of a line that [`fetch_lines`] returns.
const MAX_LINE: u64 = 4 << 10;

/// Sends a GET request, and returns the response with its headers. `deadline` includes the connection.
pub(super) async fn get(
    address: &str,
    path: &str,
    body: &str,
    deadline: Duration,
) -> Result<String, Error> {
    let read = async {
        let stream = request(address, path, body).await?;
        let mut answer = Vec::new();
        let mut limited = stream.take(MAX_RESPONSE + 1);
        limited.read_to_end(&mut answer).await?;
        Ok((answer.len() as u64 <= MAX_RESPONSE).then_some(answer))
    };
    within(deadline, address, read).await
}

/// Like [`get`], but returns only the headers and the body lines that begin with one of the prefixes. This limits the
/// memory, because a hostile member can send metrics of any size.
pub(super) async fn fetch_lines(
    address: &str,
    path: &str,
    prefixes: &[&str],
    deadline: Duration,
) -> Result<String, Error> {
    let read = async {
        let stream = request(address, path, "").await?;
        lines_of(BufReader::new(stream), prefixes).await
    };
    within(deadline, address, read).await
}

async fn request(address: &str, path: &str, body: &str) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let length = body.len();
    let request =
        format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await?;
    Ok(stream)
}

/// Runs a read within the deadline. The read returns `None` if the response is too long.
async fn within(
    deadline: Duration,
    address: &str,
    read: impl Future<Output = std::io::Result<Option<Vec<u8>>>>,
) -> Result<String, Error> {
    match timeout(deadline, read).await {
        Err(_) => Err(Error::Timeout(address.to_owned())),
        Ok(Err(error)) => Err(Error::Unreachable(format!("{address}: {error}"))),
        Ok(Ok(None)) => Err(Error::Other(format!(
            "{address}: the response is longer than that of an etcd member: check the address"
        ))),
        Ok(Ok(Some(answer))) => Ok(String::from_utf8_lossy(&answer).into_owned()),
    }
}

/// The headers of a response, and the complete lines of its body that begin with one of the prefixes. `None` if the
/// response or these lines are too long.
async fn lines_of(
    mut reader: impl AsyncBufRead + Unpin,
    prefixes: &[&str],
) -> std::io::Result<Option<Vec<u8>>> {
    let (mut kept, mut line) = (Vec::new(), Vec::new());
    let (mut total, mut in_headers, mut in_line) = (0, true, false);
    loop {
        line.clear();
        // A line of the body that is longer than `MAX_LINE` is read in several pieces, and all of them are dropped.
        let mut limited = (&mut reader).take(MAX_LINE);
        let read = limited.read_until(b'\n', &mut line).await?;
        if read == 0 {
            return Ok(Some(kept));
        }
        total += read as u64;
        let ends = line.ends_with(b"\n");
        let is_whole = ends && !in_line;
        in_line = !ends;
        let mut prefixes = prefixes.iter();
        let is_wanted = is_whole && prefixes.any(|prefix| line.starts_with(prefix.as_bytes()));
        if in_headers || is_wanted {
            kept.extend_from_slice(&line);
        }
        in_headers = in_headers && line != b"\r\n";
        if total > MAX_RESPONSE || kept.len() > MAX_KEPT {
            return Ok(None);
        }
    }
}

/// The status code and the body of a response. `None` if the response is not HTTP.
pub(super) fn parts(answer: &str) -> Option<(u16, &str)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?;
    Some((code.parse().ok()?, body))
}

/// The value of a metric without labels, in the text format of Prometheus. Ignores the last line if it has no line
/// break, because it may be incomplete.
pub(super) fn metric(body: &str, name: &str) -> Option<f64> {
    let lines = body.split_inclusive('\n');
    let mut found = lines.filter_map(|line| {
        let value = line.strip_suffix('\n')?.strip_prefix(name)?;
        value.strip_prefix(' ')
    });
    found.next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "HTTP/1.0 200 OK\r\nA: b\r\n\r\n";

    async fn lines(answer: &str) -> Option<String> {
        let kept = lines_of(answer.as_bytes(), &["a ", "b{"]).await.unwrap();
        kept.map(|kept| String::from_utf8(kept).unwrap())
    }

    #[tokio::test]
    async fn only_headers_and_requested_metrics_are_kept() {
        for (body, expected) in [
            ("", ""),
            ("a 1\nc 2\nb{x} 3\n", "a 1\nb{x} 3\n"),
            ("# a 1\nxa 1\n\na 2\r\n", "a 2\r\n"),
            // The last line has no line break, so it may be incomplete and is dropped.
            ("a 1\na 2", "a 1\n"),
        ] {
            let found = lines(&format!("{HEAD}{body}")).await.unwrap();
            assert_eq!(found, format!("{HEAD}{expected}"));
        }
    }

    #[tokio::test]
    async fn hostile_etcd_metrics_are_limited_by_line_length_and_size() {
        let long = usize::try_from(MAX_LINE).unwrap();
        // `lines_of` reads a line longer than `MAX_LINE` in pieces. It must drop the whole line, even if a later
        // piece begins with a requested prefix, here "a ".
        let split = format!("{HEAD}{}a 1\na 2\n", "x".repeat(long));
        assert_eq!(lines(&split).await, Some(format!("{HEAD}a 2\n")));
        let other = format!("{HEAD}{}a 3\n", "c 1\n".repeat(200_000));
        assert_eq!(lines(&other).await, Some(format!("{HEAD}a 3\n")));

        let many = "a 1\n".repeat(MAX_KEPT / 4);
        assert_eq!(lines(&format!("{HEAD}{many}")).await, None);
        let limit = usize::try_from(MAX_RESPONSE).unwrap();
        assert_eq!(lines(&"x".repeat(MAX_KEPT + 1)).await, None);
        assert_eq!(lines(&format!("{HEAD}{}", "\n".repeat(limit))).await, None);
    }
}
