//! Reads the server name out of a TLS ClientHello, strictly. Decrypts nothing, keeps nothing.
//!
//! Whatever a server might read differently is refused: a second server name, an extension given
//! twice, trailing bytes. So is an encrypted inner hello (RFC 9849): the name it hides could lead
//! past the policy on any server that shares its address with an allowed one.

/// Maximum size of a hello. Post-quantum key shares make 2 KiB usual;
/// session tickets may add a few more.
pub(crate) const MAX_HELLO_BYTES: usize = 32 * 1024;

const RECORD_HANDSHAKE: u8 = 22;
// RFC 8446, 5.1: a plaintext record holds at most 2^14 bytes.
const MAX_RECORD_BYTES: usize = 1 << 14;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
const HOST_NAME: u8 = 0;

/// Reads the server name, as sent, from the first bytes of a connection; `None` when more bytes are
/// needed.
pub(crate) fn read(bytes: &[u8]) -> Result<Option<String>, &'static str> {
    match handshake(bytes)? {
        Some(body) => server_name(&body).map(Some),
        None if bytes.len() > MAX_HELLO_BYTES => Err("the TLS hello is too long"),
        None => Ok(None),
    }
}

// Extracts the hello from its records; it may span several.
fn handshake(bytes: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
    let mut records = bytes;
    let mut message = Vec::new();
    loop {
        if let Some((header, rest)) = message.split_first_chunk::<4>() {
            let [kind, length @ ..] = *header;
            let [high, middle, low] = length.map(usize::from);
            let length = high << 16 | middle << 8 | low;
            if kind != CLIENT_HELLO {
                return Err("the first TLS message is not a ClientHello");
            }
            if length > MAX_HELLO_BYTES {
                return Err("the TLS hello is too long");
            }
            if rest.len() > length {
                return Err("the record of the TLS hello contains more than the hello");
            }
            if rest.len() == length {
                return Ok(Some(rest.to_vec()));
            }
        }
        let Some((payload, rest)) = record(records)? else { return Ok(None) };
        message.extend_from_slice(payload);
        records = rest;
    }
}

type Split<'a> = (&'a [u8], &'a [u8]);

// The payload of the first record and what follows it.
fn record(bytes: &[u8]) -> Result<Option<Split<'_>>, &'static str> {
    if bytes.first().is_some_and(|kind| *kind != RECORD_HANDSHAKE)
        || bytes.get(1).is_some_and(|major| *major != 3)
    {
        return Err("the connection does not use TLS");
    }
    let Some((header, rest)) = bytes.split_first_chunk::<5>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
    if length == 0 || length > MAX_RECORD_BYTES {
        return Err("a TLS record has an invalid length");
    }
    Ok(rest.split_at_checked(length))
}

fn server_name(hello: &[u8]) -> Result<String, &'static str> {
    let mut hello = Reader(hello);
    hello.take(2 + 32)?; // version and random
    let session = hello.vector8()?;
    let ciphers = hello.vector16()?;
    let compression = hello.vector8()?;
    if session.len() > 32 || ciphers.is_empty() || ciphers.len() % 2 != 0 || compression.is_empty()
    {
        return Err("the TLS hello is malformed");
    }
    let mut extensions = Reader(hello.vector16().map_err(|_| "the TLS hello has no server name")?);
    hello.end()?;
    let (mut seen, mut name) = (Vec::new(), None);
    while !extensions.0.is_empty() {
        let kind = extensions.number16()?;
        let data = extensions.vector16()?;
        if seen.contains(&kind) {
            return Err("the TLS hello repeats an extension");
        }
        seen.push(kind);
        match kind {
            SERVER_NAME => name = Some(host_name(data)?),
            ENCRYPTED_CLIENT_HELLO => return Err("the TLS hello encrypts its server name"),
            _ => {}
        }
    }
    name.ok_or("the TLS hello has no server name")
}

fn host_name(data: &[u8]) -> Result<String, &'static str> {
    let mut data = Reader(data);
    let mut list = Reader(data.vector16()?);
    data.end()?;
    let kind = list.take(1)?[0];
    let name = list.vector16()?;
    list.end()?;
    if kind != HOST_NAME || name.is_empty() || !name.is_ascii() {
        return Err("the TLS hello's server name is malformed");
    }
    String::from_utf8(name.to_vec()).map_err(|_| "the TLS hello's server name is malformed")
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or("the TLS hello is truncated")?;
        self.0 = rest;
        Ok(taken)
    }

    fn number16(&mut self) -> Result<u16, &'static str> {
        let bytes = self.take(2)?;
        Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn vector8(&mut self) -> Result<&'a [u8], &'static str> {
        let length = self.take(1)?[0];
        self.take(usize::from(length))
    }

    fn vector16(&mut self) -> Result<&'a [u8], &'static str> {
        let length = self.number16()?;
        self.take(usize::from(length))
    }

    fn end(&self) -> Result<(), &'static str> {
        if self.0.is_empty() { Ok(()) } else { Err("the TLS hello has trailing bytes") }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    fn vector16(bytes: &[u8]) -> Vec<u8> {
        [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
    }

    fn extension(kind: u16, data: &[u8]) -> Vec<u8> {
        [&kind.to_be_bytes()[..], &vector16(data)].concat()
    }

    fn sni(name: &str) -> Vec<u8> {
        extension(SERVER_NAME, &vector16(&[&[HOST_NAME][..], &vector16(name.as_bytes())].concat()))
    }

    fn hello(extensions: &[u8]) -> Vec<u8> {
        let body =
            [&[3, 3][..], &[7; 32], &[0], &vector16(&[0x13, 1]), &[1, 0], &vector16(extensions)]
                .concat();
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&[CLIENT_HELLO][..], &length[1..], &body].concat()
    }

    fn records(message: &[u8], size: usize) -> Vec<u8> {
        message
            .chunks(size)
            .flat_map(|part| [&[RECORD_HANDSHAKE, 3, 1][..], &vector16(part)].concat())
            .collect()
    }

    /// The first bytes a real TLS client sends.
    pub(crate) fn real_hello(name: &str) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let name = name.to_owned().try_into().unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn server_name_of_real_client_is_read() {
        let bytes = real_hello("example.org");
        assert_eq!(read(&bytes), Ok(Some("example.org".to_owned())));
        for cut in 0..bytes.len() {
            assert_eq!(read(&bytes[..cut]), Ok(None), "{cut}");
        }
    }

    #[test]
    fn hello_across_records_is_read() {
        assert_eq!(
            read(&records(&hello(&sni("example.org")), 3)),
            Ok(Some("example.org".to_owned()))
        );
    }

    #[test]
    fn ambiguous_hello_is_refused() {
        let twice = [sni("a.org"), sni("b.org")].concat();
        let hidden = [sni("a.org"), extension(ENCRYPTED_CLIENT_HELLO, &[0])].concat();
        let two_names =
            [&[HOST_NAME][..], &vector16(b"a.org"), &[HOST_NAME], &vector16(b"b.org")].concat();
        let two_names = extension(SERVER_NAME, &vector16(&two_names));
        for extensions in [twice, hidden, two_names, Vec::new(), sni("")] {
            assert!(read(&records(&hello(&extensions), 9999)).is_err(), "{extensions:?}");
        }
        assert!(read(b"GET / HTTP/1.1\r\n\r\n").is_err());
    }

    #[test]
    fn oversized_hello_is_refused() {
        let endless = records(&[&[CLIENT_HELLO, 0, 0x70, 0][..], &[0; 0x6fff]].concat(), 1);
        assert!(read(&endless).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_parse_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = read(&bytes);
            let _ = read(&records(&hello(&bytes), 100));
        }

        #[test]
        fn damaged_hello_never_yields_other_name(
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = records(&hello(&sni("example.org")), 9999);
            let index = at.index(bytes.len());
            bytes[index] = byte;
            if let Ok(Some(name)) = read(&bytes) {
                prop_assert!(bytes.windows(name.len()).any(|part| part == name.as_bytes()));
            }
        }

        #[test]
        fn more_bytes_never_change_the_name(cut in 0usize..200, name in "[a-z]{1,20}\\.org") {
            let bytes = records(&hello(&sni(&name)), 40);
            let head = &bytes[..cut.min(bytes.len())];
            prop_assert!(matches!(read(head), Ok(None)) || read(head) == Ok(Some(name)));
        }
    }
}
