//! Look-ups of names by the host's resolver. Each occupies a thread of the runtime until the
//! resolver answers, also after its caller gave up, and a sandbox can name hosts whose resolvers
//! never answer: the number is limited for each door and for all, below the number of threads.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::{net::lookup_host, sync::Semaphore, time::timeout};

use super::RefusalReason;

const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

// A package manager looks a name up for each of its few connections.
const MAX_OF_DOOR: usize = 16;
// A quarter of the runtime's threads for blocking work, which files and commands need too.
const MAX_OF_PROCESS: usize = 128;

static OF_PROCESS: LazyLock<Arc<Semaphore>> =
    LazyLock::new(|| Arc::new(Semaphore::new(MAX_OF_PROCESS)));

/// The look-ups of one door.
#[derive(Debug, Clone)]
pub(crate) struct Lookups {
    own: Arc<Semaphore>,
    all: Arc<Semaphore>,
}

impl Default for Lookups {
    fn default() -> Self {
        Self { own: Arc::new(Semaphore::new(MAX_OF_DOOR)), all: Arc::clone(&OF_PROCESS) }
    }
}

impl Lookups {
    /// The addresses of a name.
    pub(crate) async fn look_up(
        &self,
        name: &str,
        port: u16,
    ) -> Result<Vec<SocketAddr>, RefusalReason> {
        let name = name.to_owned();
        let found = async move { Ok(lookup_host((name, port)).await?.collect()) };
        self.run(found, LOOKUP_TIMEOUT).await
    }

    async fn run(
        &self,
        look_up: impl Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
        limit: Duration,
    ) -> Result<Vec<SocketAddr>, RefusalReason> {
        let (own, all) = (Arc::clone(&self.own), Arc::clone(&self.all));
        let found = async move {
            // In this order: a door that waits for itself holds nothing of the others'.
            let own = own.acquire_owned().await.ok()?;
            let all = all.acquire_owned().await.ok()?;
            // In its own task: the thread is occupied until it ends.
            let looked_up = tokio::spawn(async move {
                let found = look_up.await;
                drop((own, all));
                found
            });
            looked_up.await.ok()?.ok()
        };
        match timeout(limit, found).await {
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err("cannot resolve the name".into()),
            Err(_) => Err("resolving the name timed out".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn answered() -> io::Result<Vec<SocketAddr>> {
        Ok(Vec::new())
    }

    #[tokio::test]
    async fn stalled_lookups_block_only_their_own_door() {
        let all = Arc::new(Semaphore::new(2 * MAX_OF_DOOR));
        let door = || Lookups { all: Arc::clone(&all), ..Lookups::default() };
        let (hostile, other) = (door(), door());
        let stalled =
            (0..3 * MAX_OF_DOOR).map(|_| hostile.run(std::future::pending(), Duration::ZERO));
        let stalled = futures_util::future::join_all(stalled).await;
        assert!(stalled.iter().all(|one| *one == Err("resolving the name timed out".into())));
        assert_eq!(all.available_permits(), MAX_OF_DOOR, "given up, but its threads are occupied");
        assert!(hostile.run(answered(), Duration::ZERO).await.is_err());
        assert_eq!(other.run(answered(), LOOKUP_TIMEOUT).await, Ok(Vec::new()));
    }
}
