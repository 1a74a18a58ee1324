/** What this browser keeps between visits, in its IndexedDB: the key, the authority, the log of each run. */

/** @returns {Promise<IDBDatabase>} */
const opened = () =>
  new Promise((done, fail) => {
    const request = indexedDB.open("fedkseed", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("kept");
    request.onsuccess = () => done(request.result);
    request.onerror = () => fail(request.error);
  });

/** @template T @param {IDBTransactionMode} mode @param {(kept: IDBObjectStore) => IDBRequest<T>} act
 * @returns {Promise<T>} */
async function within(mode, act) {
  const database = await opened();
  try {
    return await new Promise((done, fail) => {
      const transaction = database.transaction("kept", mode, { durability: "strict" });
      const request = act(transaction.objectStore("kept"));
      transaction.oncomplete = () => done(request.result);
      transaction.onabort = () => fail(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** @param {string} name @returns {Promise<any>} undefined where there is nothing */
export const kept = (name) => within("readonly", (all) => all.get(name));

/** Keep a value; it is on disk when the promise is fulfilled. @param {string} name @param {unknown} value */
export const keep = (name, value) => within("readwrite", (all) => all.put(value, name));
