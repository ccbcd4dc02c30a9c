//! Reads the host from the head of a plain HTTP/1 request, strictly. Parses no body and no second
//! request.

/// Maximum size of a head. Twice what common servers accept.
pub(crate) const MAX_HEAD_BYTES: usize = 16 * 1024;

/// Reads the host, without its port, from the first bytes of a connection to port 80; `None` when
/// more bytes are needed.
pub(crate) fn read(bytes: &[u8]) -> Result<Option<String>, &'static str> {
    match bytes.windows(4).position(|four| four == b"\r\n\r\n") {
        Some(end) => host(&bytes[..end]).map(Some),
        None if bytes.len() > MAX_HEAD_BYTES => Err("the request's head is too long"),
        None => Ok(None),
    }
}

fn host(head: &[u8]) -> Result<String, &'static str> {
    let text = std::str::from_utf8(head).map_err(|_| "the request's head is not valid UTF-8")?;
    let mut lines = text.split("\r\n");
    if text.replace("\r\n", "").contains(['\r', '\n', '\0']) {
        return Err("the request's head has a stray control character");
    }
    let request: Vec<_> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, "HTTP/1.1" | "HTTP/1.0"] = request[..] else {
        return Err("the connection does not use HTTP");
    };
    if method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return Err("the connection does not use HTTP");
    }
    if !(target.starts_with('/') || target == "*") {
        return Err("the request's target is not a path");
    }
    let mut host = None;
    for line in lines {
        let (name, value) = line.split_once(':').ok_or("a header has no colon")?;
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("a header's name is malformed");
        }
        if name.eq_ignore_ascii_case("host") && host.replace(value.trim()).is_some() {
            return Err("the request has two host headers");
        }
    }
    let host = host.ok_or("the request has no host header")?;
    Ok(host.strip_suffix(":80").unwrap_or(host).to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn host_is_read_once_the_head_is_complete() {
        let request = b"GET /a HTTP/1.1\r\nAccept: */*\r\nhOST: Example.org:80\r\n\r\nbody";
        assert_eq!(read(request), Ok(Some("Example.org".to_owned())));
        assert_eq!(read(&request[..50]), Ok(None));
    }

    #[test]
    fn ambiguous_request_is_refused() {
        for head in [
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            "GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
            "CONNECT b:443 HTTP/1.1\r\nHost: a\r\n\r\n",
            "GET / HTTP/1.1\r\nX: y\nHost: b\r\nHost: a\r\n\r\n",
            "GET / HTTP/1.1\r\n Host: a\r\n\r\n",
            "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\n",
            "SSH-2.0-x\r\n\r\n",
        ] {
            assert!(read(head.as_bytes()).is_err(), "{head:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&[b"GET / HTTP/1.1\r\n", &bytes[..], b"\r\n\r\n"].concat());
            let _ = read(&bytes);
        }
    }
}
