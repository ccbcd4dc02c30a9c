//! Carries connections: the kernel redirects what goes to a synthetic address to this listener, the
//! gateway gets the name that address stands for. What it carries it does not look at.

use std::{io, rc::Rc, sync::Arc, time::Duration};

use harvest_proto::door::{Answer, Ask};
use tokio::{
    io::copy_bidirectional_with_sizes,
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};

use super::{Gateway, names::Names};

const MAX_CONNECTIONS: usize = 1024;

// Each way, per connection: 32 MiB in all at the limit.
const BUFFER_BYTES: usize = 16 * 1024;

const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Takes connections for ever. Beyond the limit they wait in the kernel's queue.
pub(super) async fn serve(listener: TcpListener, gateway: Rc<Gateway>, names: Rc<Names>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (gateway, names) = (Rc::clone(&gateway), Rc::clone(&names));
                tokio::task::spawn_local(async move {
                    let _place = place;
                    // Whoever is inside can make this fail as often as they like: not the log's business.
                    let _refused = carry(stream, &gateway, &names).await;
                });
            }
            Err(_too_many_files) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn carry(mut inside: TcpStream, gateway: &Gateway, names: &Names) -> io::Result<()> {
    let meant = rustix::net::sockopt::ip_original_dst(&inside)?;
    let Some(name) = names.name(*meant.ip()) else { return refuse(&inside) };
    let asked = gateway.ask_parked(&Ask::Connect { name, port: meant.port() }).await;
    let Ok((Answer::Open, mut outside)) = asked else { return refuse(&inside) };
    let _small_packets_wait = inside.set_nodelay(true);
    // A connection that breaks is the two ends' business, not the log's.
    let _broken =
        copy_bidirectional_with_sizes(&mut inside, &mut outside, BUFFER_BYTES, BUFFER_BYTES).await;
    Ok(())
}

// With a reset: the one inside learns at once that nobody is there.
fn refuse(inside: &TcpStream) -> io::Result<()> {
    inside.set_zero_linger()
}
