package dev.runnerd.client;

import dev.runnerd.v1.GenerateRequest;
import dev.runnerd.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import dev.runnerd.v1.OutputChunk;
import dev.runnerd.v1.Started;
import dev.runnerd.v1.StreamGenerateResponse;
import dev.runnerd.v1.Token;
import io.grpc.Context;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;

/**
 * The chunks of a streamed generation. Leaving the stream cancels its call, so that the server stops generating:
 *
 * <pre>{@code
 * try (GenerationStream stream = GenerationStream.open(stub, request)) {
 *   for (OutputChunk chunk : stream) {
 *     System.out.print(chunk.getText());
 *   }
 * }
 * }</pre>
 *
 * <p>A failed call throws the stub's {@link io.grpc.StatusRuntimeException}, which {@link ErrorDetails} reads. A stream
 * is for one thread, and is read once; {@link #close} may be called from any thread.
 */
public final class GenerationStream implements Iterable<OutputChunk>, AutoCloseable {
  private final Context.CancellableContext context;
  private final Iterator<StreamGenerateResponse> messages;
  private final Started started;
  private final Iterator<OutputChunk> chunks = new Chunks();
  private List<Token> prompt = List.of();

  private GenerationStream(Context.CancellableContext context, Iterator<StreamGenerateResponse> messages) {
    this.context = context;
    this.messages = messages;
    StreamGenerateResponse first = messages.next();
    if (!first.hasStarted()) {
      throw new IllegalStateException("the first message of the stream is not Started");
    }
    this.started = first.getStarted();
  }

  /**
   * Starts a generation and waits until the server has accepted it.
   *
   * @throws io.grpc.StatusRuntimeException the server refused it, or cannot be reached
   */
  public static GenerationStream open(InferenceServiceBlockingStub stub, GenerateRequest request) {
    // The blocking stub gives no handle of its call: what cancels it is the context it was made in.
    Context.CancellableContext context = Context.current().withCancellation();
    Context before = context.attach();
    try {
      return new GenerationStream(context, stub.streamGenerate(request));
    } catch (RuntimeException error) {
      context.cancel(error);
      throw error;
    } finally {
      context.detach(before);
    }
  }

  /** The request's id, seed and number of prompt tokens. */
  public Started started() {
    return started;
  }

  /** The records of the prompt's tokens, from the first chunk on, when prompt_logprobs were asked for. */
  public List<Token> prompt() {
    return prompt;
  }

  /** The chunks that were not read yet; those of different outputs interleave. Always the same iterator. */
  @Override
  public Iterator<OutputChunk> iterator() {
    return chunks;
  }

  /** Cancels the call if it has not ended. May be called again. */
  @Override
  public void close() {
    context.cancel(null);
  }

  private final class Chunks implements Iterator<OutputChunk> {
    private OutputChunk next;

    @Override
    public boolean hasNext() {
      while (next == null && messages.hasNext()) {
        StreamGenerateResponse message = messages.next();
        if (message.hasPrompt()) {
          prompt = message.getPrompt().getTokensList();
        } else if (message.hasOutput()) {
          next = message.getOutput();
        }
      }
      return next != null;
    }

    @Override
    public OutputChunk next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      OutputChunk chunk = next;
      next = null;
      return chunk;
    }
  }
}
