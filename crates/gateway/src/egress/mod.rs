//! Carries a connection to a name of the policy: looks the name up on the host, connects to public
//! addresses only, and lets bytes pass once they name the same host. Never looks into TLS.

pub(crate) mod address;
pub(crate) mod hello;
pub(crate) mod host;

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpStream, lookup_host},
    time::timeout,
};

use crate::{GatewayConfig, door::Stream, policy};

const LOOKUP_LIMIT: Duration = Duration::from_secs(10);
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
// From the open connection to the end of the hello or the request's head.
const FIRST_BYTES_LIMIT: Duration = Duration::from_secs(30);

/// Why a connection did not pass, in words.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) String);

/// Connects to a name the policy allows.
pub(crate) async fn connect(
    config: &GatewayConfig,
    name: &str,
    port: u16,
) -> Result<TcpStream, Refused> {
    let name = policy::normal(name).ok_or_else(|| Refused("this is not a host name".to_owned()))?;
    let found = match config.pinned.get(&name) {
        Some(address) => vec![*address],
        None => look_up(&name, port).await?,
    };
    let allowed =
        |found: &SocketAddr| config.allow_private_upstreams || address::is_public(found.ip());
    let usable: Vec<_> = found.into_iter().filter(allowed).collect();
    if usable.is_empty() {
        return Err(Refused("the name leads to a private address".to_owned()));
    }
    for address in usable {
        if let Ok(Ok(stream)) = timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
            // Small packets of a handshake must not wait for one another.
            let _ = stream.set_nodelay(true);
            return Ok(stream);
        }
    }
    Err(Refused("the name's server could not be reached".to_owned()))
}

async fn look_up(name: &str, port: u16) -> Result<Vec<SocketAddr>, Refused> {
    match timeout(LOOKUP_LIMIT, lookup_host((name, port))).await {
        Ok(Ok(found)) => Ok(found.collect()),
        Ok(Err(_)) => Err(Refused("the name could not be found".to_owned())),
        Err(_) => Err(Refused("looking the name up took too long".to_owned())),
    }
}

/// Carries bytes both ways until both ends are done, if the first bytes name the host they go to.
pub(crate) async fn carry(
    mut inside: Stream,
    mut outside: TcpStream,
    name: &str,
    port: u16,
) -> Result<(), Refused> {
    let first = match timeout(FIRST_BYTES_LIMIT, first_bytes(&mut inside, name, port)).await {
        Ok(first) => first?,
        Err(_) => {
            return Err(Refused("the connection did not say which host it is for".to_owned()));
        }
    };
    // Either end may hang up at any moment; that is how connections end, not something to report.
    let copied: io::Result<_> = async {
        outside.write_all(&first).await?;
        copy_bidirectional(&mut inside, &mut outside).await
    }
    .await;
    if let Err(error) = copied {
        tracing::trace!(name, %error, "a carried connection ended early");
    }
    Ok(())
}

async fn first_bytes(inside: &mut Stream, name: &str, port: u16) -> Result<Vec<u8>, Refused> {
    let mut bytes = Vec::new();
    loop {
        let named = match port {
            443 => match hello::read(&bytes) {
                hello::Hello::Partial => None,
                hello::Hello::Name(name) => Some(name),
                hello::Hello::Refused(reason) => return Err(Refused(reason.to_owned())),
            },
            _ => match host::read(&bytes) {
                host::Head::Partial => None,
                host::Head::Host(name) => Some(name),
                host::Head::Refused(reason) => return Err(Refused(reason.to_owned())),
            },
        };
        match named {
            Some(named) if policy::normal(&named) == policy::normal(name) => return Ok(bytes),
            Some(_) => {
                return Err(Refused(
                    "the connection asks for another host than the name it used".to_owned(),
                ));
            }
            None => {}
        }
        if inside.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            // It ended before it said anything wrong, as probes do.
            return if bytes.is_empty() {
                Ok(bytes)
            } else {
                Err(Refused("the connection ended early".to_owned()))
            };
        }
    }
}
